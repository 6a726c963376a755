"""Two lines on stderr around something long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """A line before, and one after with the time that it took."""
    started_s = time.monotonic()
    print(f"kvrelay: {what} …", file=sys.stderr, flush=True)  # noqa: T201 - this is its purpose
    yield
    print(f"kvrelay: {what}: done in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
