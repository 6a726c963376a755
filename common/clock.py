"""The clock that a component is given when it is made: by its process's entry point, or by a test that moves the time."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that only grow, from any beginning; ``time.monotonic`` in a process."""
