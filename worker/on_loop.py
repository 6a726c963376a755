"""What other threads say, brought to the asyncio loop that a worker's service lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class OnLoop:
    """Calls from any thread, made on the loop in the order in which they come. What comes behind the loop's end is dropped."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """On the loop, before the first call."""
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """From any thread; never blocks."""
        assert self._loop is not None, "calls come when the worker has started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
