"""A process of a benchmark that takes messages and answers: one end of a hand-off, or a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from kvrelay.common.lifeline import end_with_parent

_END_S = 20.0

Target = Callable[..., None]
"""Called with the connection to the process that started it, and the arguments."""


class Side:
    """A process. As a context manager it ends at exit."""

    def __init__(self, target: Target, *arguments: Any, ends_s: float, preload: Sequence[str] = ()) -> None:
        """Start it from a fork server that imports ``preload``. ``ends_s``: the latest monotonic time for an answer."""
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(list(preload))
        self._ends_s = ends_s
        self._connection, theirs = processes.Pipe()
        lifeline, self._lifeline = processes.Pipe(duplex=False)
        self._process = processes.Process(
            target=_run, args=(target, theirs, lifeline, arguments), daemon=True, name=target.__name__
        )
        self._process.start()
        theirs.close()
        lifeline.close()

    def tell(self, message: Any) -> None:
        """Send a message."""
        self._connection.send(message)

    def hear(self) -> Any:
        """Wait for a message. Raises RuntimeError if the process ended, or at ``ends_s``."""
        if not self._connection.poll(max(0.0, self._ends_s - time.monotonic())):
            raise RuntimeError(f"{self._process.name} said nothing in its time")
        try:
            return self._connection.recv()
        except EOFError as error:
            self._process.join(_END_S)
            raise RuntimeError(f"{self._process.name} ended with status {self._process.exitcode}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The process sees the closed connection, and ends.
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._lifeline.close()


def heard(connection: Connection) -> Iterator[Any]:
    """The messages from the other end, until None or the end of the connection."""
    with contextlib.suppress(EOFError):
        while (message := connection.recv()) is not None:
            yield message


def _run(target: Target, connection: Connection, lifeline: Connection, arguments: tuple[Any, ...]) -> None:
    end_with_parent(os.getppid())
    # The parent is the fork server, which outlives a starter that was killed. A device's memory must be free again then.
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    target(connection, *arguments)


def _end_with(lifeline: Connection) -> None:
    """End this process when the starter's end of ``lifeline`` is closed, at the latest by the starter's death."""
    lifeline.poll(None)
    os._exit(1)
