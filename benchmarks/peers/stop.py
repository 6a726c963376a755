"""How a benchmark ends when it is asked to: it unwinds, and everything that it started is stopped on the way out."""

from __future__ import annotations

import signal
from types import FrameType


def stop_in_order() -> None:
    """SIGTERM and SIGHUP do what Ctrl-C does. Main thread only; side effect: their handlers are replaced."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
