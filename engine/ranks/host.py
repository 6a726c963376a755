"""A node of a worker without the leader: it runs the processes of its ranks again and again, for one leader after the other.

It knows nothing of models and plans, and imports no torch. A rank's process ends with its leader; the next process looks for a new
leader. A process that hangs is killed here, because a leader on another host cannot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading

from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import SILENT_S, START_S, Leave, Logged, ToHost
from kvrelay.engine.ranks.nodes import HostDirectories, NodePlace
from kvrelay.engine.ranks.start import end, how_it_ended, start_rank

logger = logging.getLogger(__name__)

_HANGS_S = SILENT_S + 5.0  # later than its leader's timeout, so that the leader can report the reason first
_AGAIN_S = 1.0  # pause between the end of a process and the next start


class RankHost:
    """All ranks of one node."""

    def __init__(self, place: NodePlace, secret: bytes, directories: HostDirectories) -> None:
        """Starts the processes. ``secret``: shared with the leader."""
        self._ranks = [_HostedRank(rank, place, secret, directories) for rank in place.ranks]

    @property
    def pids(self) -> dict[int, int]:
        """The running processes by rank."""
        return {one.rank: one.pid for one in self._ranks if one.pid is not None}

    def not_live(self) -> list[str]:
        """Ranks that are not started any more; the log has the reasons."""
        return [f"nobody starts rank {one.rank}" for one in self._ranks if one.is_stuck]

    def leave(self) -> None:
        """Tell the leader that this node is asked to end, and start no more processes."""
        for one in self._ranks:
            one.leave()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all processes have ended, which after ``leave`` they do when their leader has finished. False on timeout."""
        return all(one.wait(timeout_s) for one in self._ranks)

    def close(self) -> None:
        """End the processes, and wait for their end."""
        for one in self._ranks:
            one.close()


class _HostedRank:
    def __init__(self, rank: int, place: NodePlace, secret: bytes, directories: HostDirectories) -> None:
        self.rank = rank
        self.pid: int | None = None
        self._environment = place.environment(rank)
        self._secret = secret
        self._arguments = directories.arguments
        self._link: Link[ToHost] | None = None  # to the running process
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        return not self._leaving.is_set() and not self._thread.is_alive()

    def leave(self) -> None:
        self._leaving.set()
        link = self._link
        if link is not None:
            with contextlib.suppress(OSError):  # it has ended
                link.send(Leave())

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        self._leaving.set()
        link = self._link
        if link is not None:
            link.shut()
        self._thread.join()

    def _run(self) -> None:
        while not self._leaving.is_set():
            ours, theirs = socket.socketpair()
            link: Link[ToHost] = Link(ours, ToHost)
            reading, writing = os.pipe()
            os.write(writing, self._secret)
            os.close(writing)
            with theirs:
                process = start_rank(self._environment, (theirs.fileno(), reading), *self._arguments)
            os.close(reading)
            self.pid, self._link = process.pid, link
            reason = self._watch(link, process)
            self._link = self.pid = None
            link.shut()
            end(process)
            link.close()
            if not self._leaving.is_set():
                logger.warning(
                    "rank %d (process %d) %s; starting it anew, for the next leader", self.rank, process.pid, reason
                )
                self._leaving.wait(_AGAIN_S)

    def _watch(self, link: Link[ToHost], process: subprocess.Popen[bytes]) -> str:
        """Watch the process until it is over. Returns why."""
        if self._leaving.is_set():  # asked to leave while it was starting
            return "is not needed"
        patience_s = START_S
        try:
            while (message := link.receive(patience_s)) is not None:
                patience_s = _HANGS_S
                if isinstance(message, Logged):
                    logger.log(message.level, "rank %d: %s", self.rank, message.text)
        except EOFError:
            return how_it_ended(process)
        process.kill()
        return f"has been silent for {patience_s:g} s: it was killed"
