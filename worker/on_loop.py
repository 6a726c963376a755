"""What other threads say, brought to the asyncio loop that a worker's service lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.guides.guidance import GuideCompiler, GuideResult


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


class GuidesOnLoop:
    """Another compiler, whose answers come on the loop, after ``start`` has returned. Implements GuideCompiler."""

    def __init__(self, compiler: GuideCompiler, on_loop: OnLoop) -> None:
        self._compiler = compiler
        self._on_loop = on_loop

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """See GuideCompiler."""
        self._compiler.start(sampling, output, partial(self._on_loop.call, done))

    def close(self) -> None:
        """See GuideCompiler."""
        self._compiler.close()
