"""A rank as its leader sees it, on any host: receives commands, reports, and is watched.

A thread reads each rank's messages. A rank that ends or is silent for a while is lost: it is ended, and ``on_lost`` is called.
Threads that wait for it in a collective then get an error.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import (
    SILENT_S,
    START_S,
    THEIRS_S,
    AdapterLoaded,
    Alive,
    FromRank,
    Leaving,
    Logged,
    NotLoaded,
    Stepped,
)
from kvrelay.engine.step.interface import DeviceFailedError

if TYPE_CHECKING:
    import torch

    from kvrelay.engine.kv.gathered import Part

logger = logging.getLogger(__name__)


class Rank(ABC):
    """One rank other than the leader."""

    def __init__(
        self,
        rank: int,
        place: str,
        link: Link[FromRank],
        on_lost: Callable[[Rank], None],
        on_leaving: Callable[[str], None],
    ) -> None:
        """``place``: its process, for logs. ``on_lost``: called on any thread, before ``take`` returns None. ``on_leaving``: called
        when its host is asked to end.
        """
        self.rank = rank
        self.lost: str | None = None  # why it is lost
        self.num_meetings = 0  # this and the next: see Alive
        self.share_read = 0.0
        self._place = place
        self._link = link
        self._on_lost = on_lost
        self._on_leaving = on_leaving
        self._closing = threading.Event()
        self._complaint: str | None = None  # why it has not loaded, as it says
        self._told: queue.SimpleQueue[FromRank | None] = queue.SimpleQueue()
        self._stepped: queue.SimpleQueue[Stepped | None] = queue.SimpleQueue()
        self._adapters: queue.SimpleQueue[AdapterLoaded | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)
        self._listener.start()

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def part(self, device: torch.device, num_blocks: int, block_nbytes: int) -> Part:
        """Its ``num_blocks`` physical blocks of ``block_nbytes``, on a device of this kind."""

    def send(self, message: bytes) -> None:
        """Send an encoded message. Does nothing if the rank is lost."""
        try:
            self._link.send_encoded(message)
        except OSError as error:
            if self.lost is None:
                logger.debug("rank %d takes no message: %s", self.rank, error)

    def take(self, timeout_s: float) -> FromRank | None:
        """The next message, except those for the other ``take_`` methods; None on timeout, or if the rank is lost."""
        try:
            return self._told.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def take_while_reading(self, timeout_s: float) -> FromRank | None:
        """Like ``take`` while it loads; the timeout begins anew as long as it reads."""
        while True:
            share_read = self.share_read
            told = self.take(timeout_s)
            if told is not None or self.lost is not None or self.share_read == share_read:
                return told

    def take_results(self, timeout_s: float) -> Stepped | None:
        """The next step's results, from the rank that reports them; None on timeout, or if the rank is lost."""
        try:
            return self._stepped.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def take_adapter(self) -> AdapterLoaded:
        """See :class:`kvrelay.engine.ranks.adapters.OtherRank`. One thread."""
        answer = self._adapters.get()
        if answer is None:
            self._adapters.put(None)  # no answer will come
            return AdapterLoaded(self.lost or "its engine is closed", DeviceFailedError.__name__)
        return answer

    def lose(self, reason: str) -> None:
        """Mark it lost, and end it."""
        if self.lost is None:
            self.lost = f"rank {self.rank} ({self._place}) {reason}"
            self.kill()
            self._on_lost(self)
            self._told.put(None)
            self._stepped.put(None)

    def close(self) -> None:
        """End it, and wait for its end."""
        self._closing.set()
        self._link.shut()
        self._end()
        self._listener.join()
        self._link.close()

    @abstractmethod
    def _end(self) -> None:
        """``close`` everything except the link, which is shut."""

    @abstractmethod
    def _how_it_ended(self, reason: EOFError) -> str:
        """Its link is over; say why."""

    def _listen(self) -> None:
        patience_s = START_S
        try:
            while True:
                message = self._link.receive(patience_s)
                if message is None:
                    self.lose(f"has been silent for {patience_s:g} s: it hangs")
                    return
                patience_s = SILENT_S
                self._hear(message)
        except EOFError as error:
            # If it could not continue without another rank, that one is the cause, and is lost first.
            if not self._closing.wait(THEIRS_S if self._complaint is not None else 0):
                self.lose(self._complaint or self._how_it_ended(error))
        finally:
            self._adapters.put(None)

    def _hear(self, message: FromRank) -> None:
        match message:
            case Alive(num_meetings, share_read):
                self.num_meetings, self.share_read = num_meetings, share_read
            case Logged(level, text):
                logger.log(level, "rank %d: %s", self.rank, text)
            case Stepped() as stepped:
                self._stepped.put(stepped)
            case AdapterLoaded() as loaded:
                self._adapters.put(loaded)
            case Leaving():
                self._on_leaving(f"the host of rank {self.rank} ({self._place}) is asked to end")
            case NotLoaded(reason, may_be_theirs):
                self._complaint = f"cannot load its part: {reason}"
                if not may_be_theirs:
                    self.lose(self._complaint)
            case told:
                self._told.put(told)
