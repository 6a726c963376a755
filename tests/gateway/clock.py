"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """A clock that returns ``now_s``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
