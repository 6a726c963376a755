"""Work that nobody waits for yet, put behind work that somebody waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Soon(Generic[T]):
    """Something that ``make`` makes once: behind what is due on the running loop, and what that calls up, or in :meth:`get`.

    A request's way to a worker is short if what its answer needs is made while the worker computes. What ``make`` raises
    comes out of :meth:`get`.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []  # one at most
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._prepare)  # a request for several answers begins with a task for each

    def get(self) -> T:
        """It; the same every time."""
        if not self._made:
            self._made.append(self._make())
        return self._made[0]

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # whoever asks for it is told
            self.get()
