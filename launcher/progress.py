"""Prints two lines on stderr around a long operation."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """Print a line before, and a line with the duration after. An exception prints no second line."""
    started_s = time.monotonic()
    print(f"kvrelay: {what} …", file=sys.stderr, flush=True)  # noqa: T201 - this is its purpose
    yield
    print(f"kvrelay: {what}: done in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
