"""Adapters of an engine with several ranks: each rank loads its own part when the leader says so.

    leader   LoadAdapter ─▶ its own part, too           ─▶ hears all ranks, then plans may name the slot
    rank                    its part of the files ─▶ AdapterLoaded

Steps go on meanwhile, because a rank loads on a separate thread. A slot has an adapter on all ranks or on none. All ranks have
checked the same digest, because files may differ between hosts. A slot is freed in order with plans, so after each step that the
leader launched before: a rank may not yet have begun such a step with a row of a finished sequence.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvrelay.common.adapter_files import AdapterAbsentError, AdapterError, AdapterFiles, adapter_directory
from kvrelay.engine.ranks.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from kvrelay.engine.step.interface import AdapterSlots

_ABSENT, _REFUSED = "absent", "refused"  # kinds of failures; other errors use their class's name


class RankAdapters:
    """The rank's end. Call ``take`` on the thread that computes steps."""

    def __init__(self, slots: AdapterSlots, root: Path | None, send: Callable[[AdapterLoaded], None]) -> None:
        """``slots``: of the rank's part. ``root``: the adapters' directory here; None: the leader's.

        ``send``: sends to the leader.
        """
        self._slots = slots
        self._root = root
        self._send = send

    def take(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load, or free a slot. One at a time: the leader waits for the answer to each load."""
        if isinstance(message, UnloadAdapter):
            self._slots.unload(message.slot)
        else:
            threading.Thread(target=self._answer, args=(message,), name="loads-adapter", daemon=True).start()

    def _answer(self, message: LoadAdapter) -> None:
        answer = self._load(message)
        with contextlib.suppress(OSError):  # the leader is gone, and this process is about to end
            self._send(answer)

    def _load(self, message: LoadAdapter) -> AdapterLoaded:
        try:
            directory = Path(message.directory)
            if self._root is not None:
                directory = adapter_directory(self._root, directory.name)
            self._slots.load(message.slot, directory, message.digest)
        except AdapterAbsentError as error:
            return AdapterLoaded(str(error), _ABSENT)
        except AdapterError as error:
            return AdapterLoaded(str(error), _REFUSED)
        except Exception as error:  # such as missing memory: it must end only this load
            return AdapterLoaded(str(error), type(error).__name__)
        return AdapterLoaded()


class OtherRank(Protocol):
    """The leader's view of a rank (:class:`kvrelay.engine.ranks.rank.Rank`)."""

    def send(self, message: bytes) -> None:
        """Send an encoded message. Does nothing if the rank is lost."""

    def take_adapter(self) -> AdapterLoaded:
        """Wait for the answer to the oldest load; a failure if the rank is lost."""


class RankedAdapters:
    """The leader's end. Implements :class:`kvrelay.engine.step.interface.AdapterSlots`."""

    def __init__(self, own: AdapterSlots, others: Sequence[OtherRank]) -> None:
        """``own``: of the leader's part. ``others``: the ranks from 1 on."""
        self._own = own
        self._others = others

    @property
    def num_slots(self) -> int:
        """See AdapterSlots."""
        return self._own.num_slots

    def nbytes(self, files: AdapterFiles) -> int:
        """See AdapterSlots. The size of the whole adapter: no rank holds more than that."""
        return self._own.nbytes(files)

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """See AdapterSlots. Also raises RuntimeError if a rank is lost, or cannot load its part for another reason."""
        _tell(self._others, LoadAdapter(slot, str(directory), digest))
        own: Exception | None = None
        try:
            self._own.load(slot, directory, digest)
        except Exception as error:
            own = error
        answers = [rank.take_adapter() for rank in self._others]
        failures = [(rank, answer) for rank, answer in enumerate(answers, start=1) if answer.failed is not None]
        if own is None and not failures:
            return
        if own is None:
            self._own.unload(slot)
        pairs = zip(self._others, answers, strict=True)
        _tell([rank for rank, answer in pairs if answer.failed is None], UnloadAdapter(slot))
        raise _error_of(*failures[0]) if own is None else own

    def unload(self, slot: int) -> None:
        """See AdapterSlots."""
        self._own.unload(slot)
        _tell(self._others, UnloadAdapter(slot))


def _tell(ranks: Sequence[OtherRank], message: LoadAdapter | UnloadAdapter) -> None:
    encoded = msgspec.msgpack.encode(message)
    for rank in ranks:
        rank.send(encoded)


def _error_of(rank: int, answer: AdapterLoaded) -> Exception:
    text = f"rank {rank}: {answer.failed}"
    if answer.kind == _ABSENT:
        return AdapterAbsentError(text)
    if answer.kind == _REFUSED:
        return AdapterError(text)
    return RuntimeError(f"rank {rank} has not loaded an adapter: {answer.kind}: {answer.failed}")
