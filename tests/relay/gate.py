"""Holds a fake engine's steps at a certain output length, so that no test races against the model loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvrelay.engine.fake.step import Share


class Gate:
    """Passed as ``on_step``: steps of a sequence with ``num_tokens`` output tokens wait until ``open``."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._is_open = threading.Event()
        self.reached = threading.Event()  # the gate holds a step

    def __call__(self, rows: Sequence[Share]) -> None:
        """Called on the model thread before each step."""
        if not self._is_open.is_set() and any(row.sequence.num_output_tokens >= self._num_tokens for row in rows):
            self.reached.set()
            assert self._is_open.wait(timeout=60), "the test never opened the gate"

    def open(self) -> None:
        """Let all steps run from now on."""
        self._is_open.set()
