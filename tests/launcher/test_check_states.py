"""``kvrelay check-model`` on recurrent layers of several ranks: what each rank keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.launcher import cli
from tests.models import tiny

from .test_check_model import found, write_config

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
# Two key heads, and states so large that rounding up hardly shows.
SIZES: dict[str, Any] = {**tiny.SIZES, **tiny.MORE["qwen3_next"], "linear_value_head_dim": 256, "dtype": "float32"}


def test_of_two_ranks_each_keeps_half_of_states_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "qwen3_next", **SIZES)
    asked = [str(tmp_path), "--memory-gib", "1", "--tensor-parallel"]
    of_two, of_four = (found(capsys, *asked, number)[1] for number in ("2", "4"))
    for report, most in ((of_two, 0.6), (of_four, 1.0)):
        states = [group for group in report["kv_groups"] if group["kind"] == "state"]
        assert states
        for group in states:
            share = group["bytes_per_sequence_and_rank"] / group["bytes_per_sequence"]
            assert most - 0.1 <= share <= most
    projections = 3 * 64 * 4 * (2 * 16 + 3 * 4 * 256)  # bytes in three layers: keys, and values, z, output
    more = of_four["gpu"]["weights_nbytes"] - of_two["gpu"]["weights_nbytes"]
    assert 0.4 * projections < more < 0.5 * projections  # four ranks have less of the rest


def test_the_report_says_which_states_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks do not divide two key heads, and Nemotron-H is not cut."""
    write_config(tmp_path, "qwen3_next", **SIZES)
    for number, text in (
        ("1", " per sequence\n"),
        ("2", ", of which each rank keeps "),
        ("4", ", whole on each rank\n"),
    ):
        assert cli.run(["check-model", str(tmp_path), "--memory-gib", "1", "--tensor-parallel", number]) == 0
        assert text in capsys.readouterr().out
    write_config(tmp_path, "nemotron_h", **{**tiny.SIZES, **tiny.MORE["nemotron_h"], "dtype": "float32"})
    assert cli.run(["check-model", str(tmp_path), "--memory-gib", "1", "--tensor-parallel", "2"]) == 0
    assert ", whole on each rank\n" in capsys.readouterr().out
