"""benchmarks/gpu.py: floors, rows, verdicts and the table."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_parts.checks.check_sampling import chi_squared_deviation
from gpu_parts.engine.steps import fits
from gpu_parts.engine.ttft import hidden_share
from gpu_parts.frame.floors import (
    Limits,
    decode_attention_bytes,
    decode_step_bytes,
    linear_bytes,
    prefill_attention_flops,
    prefill_flops,
)
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit, table
from gpu_parts.frame.sizes import LLAMA_3_8B
from gpu_parts.frame.timing import busy_s

LIMITS = Limits(4.3e12, 790e12, 50e9, 50e9)


def test_the_model_has_the_shape_of_llama_3_8b() -> None:
    shape = LLAMA_3_8B
    assert shape.num_layer_weights + 2 * shape.num_head_weights == pytest.approx(8.03e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 131072


@pytest.mark.parametrize(("batch", "context", "floor_ms"), [(1, 1024, 3.5), (32, 1024, 4.5), (128, 4096, 19.5)])
def test_floors_of_decode_steps_are_those_of_the_plan(batch: int, context: int, floor_ms: float) -> None:
    assert 1e3 * LIMITS.bytes_s(decode_step_bytes(LLAMA_3_8B, batch, context)) == pytest.approx(floor_ms, rel=0.02)


@pytest.mark.parametrize(("total_gib", "fitting"), [(79, 2), (139, 3)])
def test_steps_that_do_not_fit_a_gpu_are_left_out(total_gib: int, fitting: int) -> None:
    """Two steps fit an H100 and all three fit an H200."""
    steps = ((1, 1024), (32, 1024), (128, 4096))
    assert [fits(LLAMA_3_8B, *step, growth=88, total_nbytes=total_gib * 2**30) for step in steps].count(True) == fitting


def test_weights_in_8_bits_halve_what_the_layers_read() -> None:
    full, small = (decode_step_bytes(LLAMA_3_8B, 1, 1024, itemsize) for itemsize in (None, 1))
    assert full - small == LLAMA_3_8B.num_layer_weights
    assert sum(outs * ins for outs, ins in LLAMA_3_8B.linears.values()) * 32 == LLAMA_3_8B.num_layer_weights
    assert linear_bytes(3, 10, 20, 1) == 200 + 3 * (10 + 20) * 2


def test_floor_of_prefill_is_that_of_the_plan() -> None:
    assert 1e3 * LIMITS.flops_s(prefill_flops(LLAMA_3_8B, 8192)) == pytest.approx(167, rel=0.01)


def test_attention_counts_every_pair_once() -> None:
    per_pair = 4 * LLAMA_3_8B.num_q_heads * LLAMA_3_8B.head_dim
    assert prefill_attention_flops(LLAMA_3_8B, 3, 0) == per_pair * (1 + 2 + 3)
    assert prefill_attention_flops(LLAMA_3_8B, 3, 10) == per_pair * (11 + 12 + 13)


def test_fp8_halves_the_keys_and_values() -> None:
    queries = 2 * 32 * 128 * 2
    assert decode_attention_bytes(LLAMA_3_8B, 1, 100) == 100 * 4096 + queries
    assert decode_attention_bytes(LLAMA_3_8B, 1, 100, itemsize=1) == 100 * 2048 + queries


FLOOR_GOAL = Goal("≤ 1.25x the floor", Against.FLOOR, 1.25)
PEER_GOAL = Goal("≥ 1x the best peer", Against.PEER, 1.0)
RATE_GOAL = Goal("≥ 4x the peer", Against.PEER, 4.0, is_at_least=True)
VALUE_GOAL = Goal("≥ 80 %", Against.VALUE, 0.8, is_at_least=True)


def test_times_are_compared_with_the_floor_and_the_fastest_peer() -> None:
    peers = (Peer("slow", 3.0), Peer("fast", 1.5), Peer("gone", None, "not installed"))
    row = Row("a", Unit.SECONDS, 1.2, 1.0, (FLOOR_GOAL, PEER_GOAL), peers)
    assert row.ratio == pytest.approx(1.2)
    assert row.best_peer == peers[1]
    assert [row.verdict(goal) for goal in row.goals] == ["met", "met"]
    slower = Row("a", Unit.SECONDS, 1.6, 1.0, (FLOOR_GOAL, PEER_GOAL), peers)
    assert [slower.verdict(goal) for goal in slower.goals] == ["missed", "missed"]


def test_rates_are_compared_with_the_largest_peer() -> None:
    row = Row("b", Unit.TOKENS_PER_S, 900.0, goals=(RATE_GOAL,), peers=(Peer("x", 100.0), Peer("y", 230.0)))
    assert row.best_peer == Peer("y", 230.0)
    assert row.verdict(RATE_GOAL) == "missed"


def test_what_is_missing_is_said() -> None:
    row = Row("c", Unit.SECONDS, 1.0, None, (FLOOR_GOAL, PEER_GOAL), (Peer("gone", None, "not installed"),))
    assert [row.verdict(goal) for goal in row.goals] == ["no floor", "no peer"]
    unmeasured = Row("c", Unit.SHARE, None, goals=(VALUE_GOAL,), note="refused")
    assert unmeasured.verdict(VALUE_GOAL) == "not measured"
    assert Row("c", Unit.SHARE, 0.81, goals=(VALUE_GOAL,)).verdict(VALUE_GOAL) == "met"


def test_the_table_has_a_line_for_each_row_and_verdicts_unless_times_mean_nothing() -> None:
    rows = [
        Row("kernel", Unit.SECONDS, 120e-6, 100e-6, (FLOOR_GOAL,), (Peer("other", 2e-3), Peer("gone", None, "why"))),
        Row("nothing", Unit.BYTES_PER_S, None, note="does not fit"),
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    for word in ("kernel", "120.0 µs", "100.0 µs", "1.20", "≤ 1.25x the floor: met", "other 2.00 ms", "gone absent"):
        assert word in lines[2]
    assert "does not fit" in lines[3]
    assert "met" not in table(rows, has_verdicts=False)


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (Unit.SECONDS, 0.0005, "500.0 µs"),
        (Unit.SECONDS, 0.167, "167.00 ms"),
        (Unit.BYTES_PER_S, 4.3e12, "4,300.00 GB/s"),
        (Unit.FLOPS_PER_S, 790e12, "790.0 TFLOP/s"),
        (Unit.TOKENS_PER_S, 12345.6, "12,346 tokens/s"),
        (Unit.SHARE, 0.031, "3.1 %"),
    ],
)
def test_numbers_for_people(unit: Unit, value: float, text: str) -> None:
    assert unit.text(value) == text


def test_busy_time_counts_what_overlaps_once() -> None:
    assert busy_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (6.0, 6.5)]) == pytest.approx(4.5)
    assert busy_s([]) == 0.0


def test_a_hand_off_is_hidden_but_for_what_comes_behind_the_commit() -> None:
    assert hidden_share(0.05, 0.25) == pytest.approx(0.8)
    assert hidden_share(0.4, 0.25) == 0.0


def test_a_fair_sampler_passes_and_a_skewed_one_does_not() -> None:
    expected = torch.tensor([600.0, 300.0, 97.0, 3.0, 0.0], dtype=torch.float64)
    fair = torch.tensor([610.0, 290.0, 96.0, 4.0, 0.0], dtype=torch.float64)
    assert abs(chi_squared_deviation(fair, expected)) < 2
    assert chi_squared_deviation(expected.flip(0).roll(-1), expected) > 100
    excluded = fair + torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    assert chi_squared_deviation(excluded, expected) == math.inf
