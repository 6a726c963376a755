"""A process of a benchmark that is told what to do and answers: one end of a hand-off, or a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from kvrelay.common.lifeline import end_with_parent

_END_S = 20.0

Target = Callable[..., None]
"""Called with the connection to the process that started it, and the arguments."""


class Side:
    """One of them. Use it as a context manager: it is gone afterwards."""

    def __init__(self, target: Target, *arguments: Any, ends_s: float, preload: Sequence[str] = ()) -> None:
        """Started at once, by a server that imports ``preload``. ``ends_s``: until when it may say something, monotonic."""
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(list(preload))
        self._ends_s = ends_s
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(
            target=_run, args=(target, theirs, arguments), daemon=True, name=target.__name__
        )
        self._process.start()
        theirs.close()

    def tell(self, message: Any) -> None:
        """Say something."""
        self._connection.send(message)

    def hear(self) -> Any:
        """Wait for a word. Raises RuntimeError if the process ended, or its time did."""
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
        # The other end sees the connection close, and ends.
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def heard(connection: Connection) -> Iterator[Any]:
    """What the other end says until it says None, or is done with this process."""
    with contextlib.suppress(EOFError):
        while (message := connection.recv()) is not None:
            yield message


def _run(target: Target, connection: Connection, arguments: tuple[Any, ...]) -> None:
    end_with_parent(os.getppid())
    target(connection, *arguments)
