"""Progress of a model's load as log lines: enough to see that it moves, few enough to read."""

from __future__ import annotations

import logging

_STEP_PERCENT = 25


class LoggedProgress:
    """A progress callback that logs every quarter."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_percent = _STEP_PERCENT

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are loaded."""
        percent = 100 * done // max(1, total)
        if percent >= self._next_percent:
            self._next_percent = percent - percent % _STEP_PERCENT + _STEP_PERCENT
            self._logger.info("loading weights: %d %% of %.0f MB", percent, total / 1e6)
