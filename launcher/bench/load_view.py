"""Shows a load while it runs: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.launcher.bench.load import Counts

_LINE_EVERY_S = 10.0

Update = Callable[[float, Counts], None]  # seconds since the start, counts so far


@contextmanager
def load_view(console: Console, *, total_s: float | None, total_requests: int | None) -> Iterator[Update]:
    """Gives what is to be called now and then. The bar follows ``total_requests`` if known, else the time."""
    if not console.is_terminal:
        last_s = 0.0

        def say(elapsed_s: float, counts: Counts) -> None:
            nonlocal last_s
            if elapsed_s - last_s >= _LINE_EVERY_S:
                last_s = elapsed_s
                console.print(f"{elapsed_s:.0f} s: {describe(counts)}")

        yield say
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        total = total_requests if total_requests is not None else total_s
        task = progress.add_task("", total=total)

        def show(elapsed_s: float, counts: Counts) -> None:
            done = float(counts.answered) if total_requests is not None else elapsed_s
            progress.update(task, completed=done if total is None else min(done, total), description=describe(counts))

        yield show


def describe(counts: Counts) -> str:
    """One line."""
    failed = f", {counts.failed} failed" if counts.failed else ""
    num_running = counts.sent - counts.answered
    return f"{counts.sent} sent, {num_running} running, {counts.answered} answered{failed}, {counts.chunks} chunks"
