"""Adapters of an engine of several ranks: each loads its part when the leader says so, on a link of its own, beside steps.

    leader   Load ─▶ its own part, too        ─▶ hears all ranks, then plans may name the slot
    rank            its part of the files ─▶ Loaded

A slot has an adapter on all ranks or on none. It is freed behind the steps that were launched by then: a rank may not have begun
with one of them that has a row of a sequence that is over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvrelay.common.adapter_files import AdapterAbsentError, AdapterError, AdapterFiles
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.step.interface import AdapterSlots


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load your part of an adapter; see AdapterSlots.load."""

    slot: int
    directory: str
    digest: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free a slot. Nobody waits for it: the next load comes behind it."""

    slot: int
    num_launched: int  # steps that the leader had launched by then; a later one has no rows of it


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The part is there; or not, and why."""

    failed: str | None = None
    kind: str = ""  # of the failure: _ABSENT, _REFUSED, or the name of another error's class


ToAdapters = LoadAdapter | UnloadAdapter
_ABSENT, _REFUSED = "absent", "refused"


class Launches:
    """How many steps a rank has launched. Any thread."""

    def __init__(self) -> None:
        self._num = 0
        self._changed = threading.Condition()

    def count(self) -> None:
        """One more, or one that could not be launched on any rank."""
        with self._changed:
            self._num += 1
            self._changed.notify_all()

    def wait_for(self, num_launched: int) -> None:
        """Until there were so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._num >= num_launched)


class AdapterServer:
    """The rank's end. ``serve`` is one thread's."""

    def __init__(self, link: Link[ToAdapters], slots: AdapterSlots, launches: Launches) -> None:
        """``slots``, ``launches``: the rank's own."""
        self._link = link
        self._slots = slots
        self._launches = launches

    def serve(self) -> None:
        """Until the leader ends."""
        try:
            while (message := self._link.receive()) is not None:
                match message:
                    case LoadAdapter():
                        self._link.send(self._load(message))
                    case UnloadAdapter(slot, num_launched):
                        self._launches.wait_for(num_launched)
                        self._slots.unload(slot)
        except (EOFError, OSError):
            pass
        finally:
            self._link.shut()  # whoever waits for an answer hears that there will be none

    def _load(self, message: LoadAdapter) -> AdapterLoaded:
        try:
            self._slots.load(message.slot, Path(message.directory), message.digest)
        except AdapterAbsentError as error:
            return AdapterLoaded(str(error), _ABSENT)
        except AdapterError as error:
            return AdapterLoaded(str(error), _REFUSED)
        except Exception as error:  # memory that is not there, for instance: it must end this load alone
            return AdapterLoaded(str(error), type(error).__name__)
        return AdapterLoaded()


class RankedAdapters:
    """The leader's end. Implements :class:`kvrelay.engine.step.interface.AdapterSlots`."""

    def __init__(
        self, own: AdapterSlots, links: Sequence[Link[AdapterLoaded]], num_launched: Callable[[], int]
    ) -> None:
        """``own``: of the leader's part. ``links``: to the other ranks, from 1 on. ``num_launched``: steps so far."""
        self._own = own
        self._links = links
        self._num_launched = num_launched

    @property
    def num_slots(self) -> int:
        """See AdapterSlots."""
        return self._own.num_slots

    def nbytes(self, files: AdapterFiles) -> int:
        """See AdapterSlots. Of the whole adapter: no rank holds more than that."""
        return self._own.nbytes(files)

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """See AdapterSlots. Raises RuntimeError if a rank cannot load its part for another reason, or is gone."""
        for link in self._links:
            _send(link, LoadAdapter(slot, str(directory), digest))
        own: Exception | None = None
        try:
            self._own.load(slot, directory, digest)
        except Exception as error:
            own = error
        answers = [_answer(link) for link in self._links]
        if own is None and not any(answer.failed is not None for answer in answers):
            return
        if own is None:
            self._own.unload(slot)
        for link, answer in zip(self._links, answers, strict=True):
            if answer.failed is None:
                _send(link, UnloadAdapter(slot, 0))  # no step has had it
        if own is not None:
            raise own
        raise next(_error_of(rank, answer) for rank, answer in enumerate(answers, start=1) if answer.failed is not None)

    def unload(self, slot: int) -> None:
        """See AdapterSlots."""
        self._own.unload(slot)
        for link in self._links:
            _send(link, UnloadAdapter(slot, self._num_launched()))


def _send(link: Link[AdapterLoaded], message: ToAdapters) -> None:
    """What is sent to a rank that is gone goes nowhere: the worker ends with it."""
    with contextlib.suppress(OSError):
        link.send(message)


def _answer(link: Link[AdapterLoaded]) -> AdapterLoaded:
    try:
        answer = link.receive()
    except (EOFError, OSError) as error:
        return AdapterLoaded(f"it is gone ({error})", type(error).__name__)
    assert answer is not None, "a wait without end has ended"
    return answer


def _error_of(rank: int, answer: AdapterLoaded) -> Exception:
    text = f"rank {rank}: {answer.failed}"
    if answer.kind == _ABSENT:
        return AdapterAbsentError(text)
    if answer.kind == _REFUSED:
        return AdapterError(text)
    return RuntimeError(f"rank {rank} has not loaded an adapter: {answer.kind}: {answer.failed}")
