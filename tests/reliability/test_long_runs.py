"""Short runs of chaos, overload and soak on fake engines. They check what must hold for a run of any length.

Goodput and the growth of memory cannot be measured in seconds on a busy machine. ``make chaos`` and ``make soak`` measure them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import overload
from .chaos import chaos
from .chaos_report import Report
from .questions import Answer
from .soak import slope, soak

FAKE_OPTIONS = ["--engine", "fake", "--num-blocks", "512", "--fake-step-ms", "2"]


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's tokenizer."""
    from kvrelay.launcher.models import resolve_model  # noqa: PLC0415 - seconds to import

    return resolve_model("demo")


async def test_chaos(model: Path) -> None:
    report = await chaos(model, 6.0, 5, num_clients=8, worker_options=FAKE_OPTIONS, num_questions=12)
    assert report.problems(max_growth_mib=60) == []
    assert report.same > 30
    assert report.faults.total() > 2


async def test_a_rolling_restart_of_everything(model: Path) -> None:
    report = await chaos(model, None, 5, num_clients=8, worker_options=FAKE_OPTIONS, num_questions=8, well_s=0.3)
    assert report.problems(max_growth_mib=60) == []
    assert report.cut == 0
    assert report.faults == {"drain prefill": 2, "drain decode": 2, "drain gateway": 2}


async def test_overload(model: Path) -> None:
    outcomes = await overload.run(model, [1.0, 5.0], 2.0, 1)
    normal, heavy = outcomes
    assert not normal.other
    assert not heavy.other
    assert normal.good > normal.offered / 2
    assert heavy.good > 0
    assert heavy.refused > heavy.offered / 3


async def test_soak(model: Path) -> None:
    report = await soak(model, 4.0, 1, num_clients=6, worker_options=FAKE_OPTIONS)
    assert report.problems(max_slope=1e9) == []
    assert min(report.ends[end] for end in ("left", "refused", "streamed", "whole")) > 0


def test_every_difference_is_seen() -> None:
    right = Answer("a b", [1, 2], [-0.5, -1.0], "stop", {"completion_tokens": 2})
    assert right.differs(right) is None
    for wrong in (
        Answer("a c", [1, 2], [-0.5, -1.0], "stop", {"completion_tokens": 2}),
        Answer("a b", [1, 3], [-0.5, -1.0], "stop", {"completion_tokens": 2}),
        Answer("a b", [1, 2], [-0.5, -1.1], "stop", {"completion_tokens": 2}),
        Answer("a b", [1, 2], [-0.5], "stop", {"completion_tokens": 2}),
        Answer("a b", [1, 2], [-0.5, -1.0], "length", {"completion_tokens": 2}),
        Answer("a b", [1, 2], [-0.5, -1.0], "stop", {"completion_tokens": 3}),
    ):
        assert wrong.differs(right) is not None
    assert Report(different=["x"], errors=["y"], bad_exits=["z"]).problems(1.0) == [
        "another answer: x",
        "an error: y",
        "a bad end: z",
    ]


def test_a_slope_is_not_moved_by_single_readings() -> None:
    assert slope([(second, 100.0 + 0.5 * second) for second in range(20)]) == pytest.approx(0.5)
    assert slope([(second, 400.0 if second == 7 else 100.0) for second in range(20)]) == 0.0
    assert slope([(1.0, 5.0)]) == 0.0
