"""Shared by the comparisons on one machine: options, output folder, progress messages, and orderly ends."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

from kvrelay.common.errors import KvrelayError

Say = Callable[[str], None]

work_dir_option = click.option(
    "--work-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Logs and every request of the last samples; default: a new temporary directory.",
)


def dtype_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``--dtype``; ``text`` is its help."""
    kinds = click.Choice(["bfloat16", "float32"])
    return click.option("--dtype", type=kinds, default="bfloat16", show_default=True, help=text)


def plots_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``--plots``, a folder; ``text`` is its help."""
    return click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help=text)


def begin(work_dir: Path | None, name: str) -> tuple[Path, Say]:
    """The folder for output, and a function that prints progress.

    From now on SIGTERM and SIGHUP act like Ctrl-C: everything that was started is stopped.
    """
    work = work_dir or Path(tempfile.mkdtemp(prefix=f"kvrelay-{name}-"))
    work.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:5.0f} s] {text}", flush=True)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    say(f"logs in {work}")
    return work.resolve(), say


def run(main: click.Command) -> None:
    """Run a comparison. An expected error ends as one line."""
    try:
        main()
    except KvrelayError as error:
        sys.exit(f"error: {error}")
