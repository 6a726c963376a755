"""One line on stderr while something long runs: a spinner with the time on a terminal, two plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Progress = Callable[[str], AbstractContextManager[None]]


def stderr_progress() -> Progress:
    """Shows on stderr what runs between enter and exit, and for how long."""
    return _spinner if sys.stderr.isatty() else announce


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[None]:
    from rich.console import Console  # noqa: PLC0415 - not for commands that show nothing
    from rich.progress import Progress as Bar  # noqa: PLC0415
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=None)
        yield


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """A line before and a line after; also on a terminal, for work that draws its own bars."""
    started_s = time.monotonic()
    print(f"kvrelay: {what} …", file=sys.stderr, flush=True)  # noqa: T201 - this is its purpose
    yield
    print(f"kvrelay: {what}: done in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
