"""Finds what would pass unnoticed in a world: code that reads the real clock, and errors that the code survives and only logs."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_READS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns", "sleep")


@contextlib.contextmanager
def no_real_clock(problems: list[str]) -> Iterator[None]:
    """Make kvrelay's own code fail when it reads the real clock or sleeps by it. Libraries may still read it.

    The failure is also added to ``problems``, because a worker may take the exception for a failed step.
    """
    # Threads that an earlier test left running may read the real clock.
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def guarded(name: str) -> Callable[..., Any]:
        real = getattr(time, name)

        def read(*args: float) -> Any:
            reader = sys._getframe(1).f_globals["__name__"]
            if reader.startswith("kvrelay.") and threading.get_ident() not in others:
                problems.append(f"{reader} calls time.{name}() in virtual time")
                raise AssertionError(problems[-1])
            return real(*args)

        return read

    with contextlib.ExitStack() as stack:
        for name in _READS:
            stack.enter_context(mock.patch.object(time, name, guarded(name)))
        yield


@contextlib.contextmanager
def no_logged_errors(problems: list[str]) -> Iterator[None]:
    """Add all that kvrelay logs as an error to ``problems``, and print nothing of its log."""
    logger = logging.getLogger("kvrelay")
    before = logger.level
    with mock.patch.multiple(logger, handlers=[_Noting(problems)], propagate=False):
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)


class _Noting(logging.Handler):
    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._problems.append(f"{record.name}: {record.getMessage()}{'' if error is None else f': {error!r}'}")
