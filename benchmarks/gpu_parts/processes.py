"""Two processes of one section that share the device, as two workers on one GPU do."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from gpu_parts.running import PRELOADED, Context
from kvrelay.common.lifeline import end_with_parent

_END_S = 20.0

Target = Callable[..., None]
"""Called with a :class:`Context`, the connection to the section's process, and what else was given."""


class Side:
    """One of them. Use it as a context manager: it is gone afterwards."""

    def __init__(self, target: Target, context: Context, *arguments: Any) -> None:
        """Started at once; ``arguments`` follow the connection."""
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(PRELOADED)
        self._ends_s = context.ends_s
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(
            target=_run, args=(target, context, theirs, arguments), daemon=True, name=target.__name__
        )
        self._process.start()
        theirs.close()

    def tell(self, message: Any) -> None:
        """Say something."""
        self._connection.send(message)

    def hear(self) -> Any:
        """Wait for a word. Raises RuntimeError if the process ended, or the section's time did."""
        if not self._connection.poll(max(0.0, self._ends_s - time.monotonic())):
            raise RuntimeError(f"{self._process.name} said nothing in the section's time")
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


def wait_for_end(connection: Connection) -> None:
    """Return when the section's process is done with this one."""
    try:
        connection.recv()
    except EOFError:
        return


def _run(target: Target, context: Context, connection: Connection, arguments: tuple[Any, ...]) -> None:
    end_with_parent(os.getppid())
    target(context, connection, *arguments)
