"""The type of a component's clock. The entry point of its process passes a real one, a test one that it moves itself."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that only grow, from any beginning; ``time.monotonic`` in a process."""
