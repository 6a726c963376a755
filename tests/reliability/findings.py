"""The findings of a fuzzing run: undocumented exceptions, with one input for each kind."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from .figures import rss_mib

MAX_GROWTH_MIB = 6.0
_WARM_UP_SHARE = 0.15


class Findings:
    """Calls the fuzzed code and keeps its exceptions."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def of(self, call: Callable[[], object], what: Callable[[], str]) -> None:
        """Call; an exception is a finding. ``what`` describes the input, and is called for the first of each kind only."""
        try:
            call()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            key = (type(error).__name__, f"{Path(place.filename).name}:{place.lineno}")
            if key not in self._kinds:
                self._kinds[key] = [f"{key[0]} at {key[1]}: {str(error)[:200]} | {what()[:600]}"]
            else:
                self._kinds[key].append("")

    def check(self) -> None:
        """Raises AssertionError with all kinds of findings."""
        lines = [f"{len(found)} times {found[0]}" for found in self._kinds.values()]
        assert not lines, f"{len(lines)} kinds of exceptions that nobody documented:\n  " + "\n  ".join(lines)


def run_batches(batch: Callable[[], int], num_frames: int) -> str:
    """Run batches until ``num_frames`` frames are sent. Returns the figures. Raises AssertionError if memory grows."""
    started_s = time.monotonic()
    done, warm_mib = 0, 0.0
    while done < num_frames:
        done += batch()
        if done >= num_frames * _WARM_UP_SHARE and not warm_mib:
            warm_mib = _settled_mib()
    end_mib = _settled_mib()
    assert end_mib - warm_mib < MAX_GROWTH_MIB, f"resident memory grew from {warm_mib:.1f} to {end_mib:.1f} MiB"
    seconds = time.monotonic() - started_s
    return f"{done} frames in {seconds:.1f} s, {warm_mib:.1f} MiB resident when warm, {end_mib:.1f} MiB at the end"


def _settled_mib() -> float:
    gc.collect()
    return rss_mib()
