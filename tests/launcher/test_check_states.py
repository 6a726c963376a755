"""``kvrelay check-model`` on recurrent layers of several ranks: what each rank keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.launcher import check_model
from kvrelay.launcher.check_model import Report
from tests.models import tiny

from .test_check_model import write_config

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
# Two key heads, and states so large that rounding up hardly shows.
SIZES: dict[str, Any] = {**tiny.MORE["qwen3_next"], "linear_value_head_dim": 256}


@pytest.fixture(autouse=True)
def _without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no random weights to compare: what is kept does not depend on them."""
    monkeypatch.setattr(check_model, "_MOST_RANDOM", 0)


def report_of(directory: Path, model_type: str, num_ranks: int, sizes: dict[str, Any]) -> Report:
    write_config(directory, model_type, **{**tiny.SIZES, **sizes, "dtype": "float32"})
    report = check_model.examine("tiny", directory, "auto", 1.0, num_ranks, 1)
    assert report.reason is None
    return report


def test_of_two_ranks_each_keeps_half_of_states_and_weights(tmp_path: Path) -> None:
    """Four ranks do not divide two key heads."""
    of_two, of_four = (report_of(tmp_path, "qwen3_next", number, SIZES).as_json() for number in (2, 4))
    for report, most in ((of_two, 0.6), (of_four, 1.0)):
        states = [group for group in report["kv_groups"] if group["kind"] == "state"]
        shares = {group["bytes_per_sequence_and_rank"] / group["bytes_per_sequence"] for group in states}
        assert most - 0.1 <= min(shares) <= max(shares) <= most
    projections = 3 * 64 * 4 * (2 * 16 + 3 * 4 * 256)  # bytes in three layers: keys, and values, z, output
    more = of_four["gpu"]["weights_nbytes"] - of_two["gpu"]["weights_nbytes"]
    assert 0.4 * projections < more < 0.5 * projections  # four ranks have less of the rest


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "sizes", "text"),
    [
        ("qwen3_next", 1, SIZES, ""),
        ("qwen3_next", 2, SIZES, ", of which each rank keeps "),
        ("qwen3_next", 4, SIZES, ", whole on each rank"),
        ("nemotron_h", 2, tiny.MORE["nemotron_h"], ", whole on each rank"),  # no type whose layers are cut
    ],
)
def test_the_report_says_what_ranks_keep_of_states(
    model_type: str, num_ranks: int, sizes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    rows = [row for row in report_of(tmp_path, model_type, num_ranks, sizes).lines() if " state: " in row]
    assert rows
    for row in rows:
        behind = row.partition(" per sequence")[2]
        assert behind.startswith(text) if text else not behind
