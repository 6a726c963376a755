"""A model's load as log lines: what is loaded from where, how far it is, and how long it took."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kvrelay.common.clock import Clock

_PERIOD_S = 10.0


def log_begin(logger: logging.Logger, directory: Path) -> None:
    """One line before anything is imported or read for the model in ``directory``: either may take minutes on a slow disk."""
    # Of a broken link the loader complains.
    files = [path for path in directory.glob("*.safetensors") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    num_files = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    logger.info("loading %s: %.0f MB of weights in %s from %s", directory.name, num_bytes / 1e6, num_files, directory)


class LoggedProgress:
    """A progress callback that logs a line every ten seconds, and one when all weights are read. It is for one load."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._begin_s = self._logged_s = clock()
        self._is_over = False

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are read."""
        now_s = self._clock()
        if self._is_over:
            return
        if done >= total:
            self._is_over = True
            self._logger.info("read %.0f MB of weights in %.1f s", total / 1e6, now_s - self._begin_s)
        elif now_s - self._logged_s >= _PERIOD_S:
            self._logged_s = now_s
            percent = 100 * done // total
            self._logger.info("read %d %% of %.0f MB of weights in %.0f s", percent, total / 1e6, now_s - self._begin_s)


class OthersProgress:
    """Logs a line every ten seconds, as long as one of the other ranks reads its weights. It is for one load."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._logged_s = clock()

    def __call__(self, shares: Mapping[int, float]) -> None:
        """``shares``: which share of its weights each rank has read."""
        now_s = self._clock()
        if now_s - self._logged_s < _PERIOD_S:
            return
        self._logged_s = now_s
        last = min(shares, key=lambda rank: shares[rank])
        if shares[last] < 1:
            self._logger.info(
                "of the other ranks, rank %d has read least: %d %% of its weights", last, int(100 * shares[last])
            )
