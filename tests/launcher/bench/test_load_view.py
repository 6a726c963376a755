"""What is seen of a load while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvrelay.launcher.bench.load import Counts
from kvrelay.launcher.bench.load_view import load_view


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=160, color_system=None), file


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    plain, file = console(is_terminal=False)
    with load_view(plain, total_s=60.0, total_requests=None) as update:
        for tick in range(50):
            update(tick * 0.5, Counts(sent=tick, answered=tick // 2, failed=1 if tick > 30 else 0, chunks=10 * tick))
    assert file.getvalue().splitlines() == [
        "10 s: 20 sent, 10 running, 10 answered, 200 chunks",
        "20 s: 40 sent, 20 running, 20 answered, 1 failed, 400 chunks",
    ]


@pytest.mark.parametrize(
    ("total_s", "total_requests", "filled"), [(20.0, None, 0.25), (None, 8, 0.75), (20.0, 8, 0.75)]
)
def test_a_terminal_gets_a_bar_that_follows_requests_or_else_the_time(
    total_s: float | None, total_requests: int | None, filled: float
) -> None:
    terminal, file = console(is_terminal=True)
    with load_view(terminal, total_s=total_s, total_requests=total_requests) as update:
        update(5.0, Counts(sent=7, answered=6, chunks=30))
    shown = file.getvalue()
    assert "7 sent, 1 running, 6 answered, 30 chunks" in shown
    last = next(line for line in reversed(shown.splitlines()) if "7 sent" in line)
    full, empty = last.count("\u2501"), 40
    assert full / empty == pytest.approx(filled, abs=0.03)
