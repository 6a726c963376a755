"""A rank's process as its leader sees it: started, told what to do, watched.

A thread listens to each. A process that ends, or says nothing for a while, is lost: it is killed, and ``on_lost`` hears of it.
Whoever waits for it in a collective then gets an error instead of waiting on.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from kvrelay.engine.ranks.adapters import AdapterLoaded
from kvrelay.engine.ranks.blocks import Moved
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import Alive, FromRank, Logged

logger = logging.getLogger(__name__)

_SILENT_S = 15.0  # every rank gives a sign of life each second, whatever it computes
_END_S = 5.0  # what a rank that is not needed any more may take to end


class RankProcess:
    """One rank but the leader."""

    def __init__(self, rank: int, environment: Mapping[str, str], on_lost: Callable[[RankProcess], None]) -> None:
        """Starts it. ``environment``: added to this process's. ``on_lost``: hears of it on any thread, before ``take`` tells."""
        self.rank = rank
        self.lost: str | None = None  # why it is of no use any more
        self.num_meetings = 0  # see Alive
        # For its KV pool, which the leader reads and writes; of a pool on a GPU for one block, by ``blocks``.
        self.pool_memory = os.memfd_create(f"kvrelay-kv-{rank}")
        self._on_lost = on_lost
        self._is_closing = False
        self._told: queue.SimpleQueue[FromRank | None] = queue.SimpleQueue()
        (ours, theirs), (our_blocks, their_blocks) = socket.socketpair(), socket.socketpair()
        our_adapters, their_adapters = socket.socketpair()
        with theirs, their_blocks, their_adapters:
            descriptors = (theirs.fileno(), their_blocks.fileno(), their_adapters.fileno(), self.pool_memory)
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "kvrelay.engine.rank_main", *map(str, descriptors)],
                env={**os.environ, **environment},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the leader, which may still have requests to finish
            )
        self._link: Link[FromRank] = Link(ours, FromRank)
        self.blocks: Link[Moved] = Link(our_blocks, Moved)
        self.adapters: Link[AdapterLoaded] = Link(our_adapters, AdapterLoaded)
        self._listener = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """An encoded message. What is sent to one that is lost goes nowhere."""
        try:
            self._link.send_encoded(message)
        except OSError as error:
            if self.lost is None:
                logger.debug("rank %d takes no message: %s", self.rank, error)

    def take(self, timeout_s: float | None = None) -> FromRank | None:
        """The next message but for signs of life and log lines; None if it comes too late, or the rank is lost."""
        try:
            return self._told.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def lose(self, reason: str) -> None:
        """It is of no use any more, and ends."""
        if self.lost is None:
            self.lost = f"rank {self.rank} (process {self.pid}) {reason}"
            self._process.kill()
            self._on_lost(self)
            self._told.put(None)

    def close(self) -> None:
        """End it, and wait for that."""
        self._is_closing = True
        self._link.shut()
        self.blocks.shut()
        self.adapters.shut()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._link.close()
        self.blocks.close()
        self.adapters.close()
        os.close(self.pool_memory)

    def _listen(self) -> None:
        try:
            while True:
                match self._link.receive(_SILENT_S):
                    case None:
                        self.lose(f"has been silent for {_SILENT_S:g} s: it hangs")
                        return
                    case Alive(num_meetings):
                        self.num_meetings = num_meetings
                    case Logged(level, text):
                        logger.log(level, "rank %d: %s", self.rank, text)
                    case told:
                        self._told.put(told)
        except EOFError:
            if not self._is_closing:
                self.lose(self._end())

    def _end(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "has closed its link"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
