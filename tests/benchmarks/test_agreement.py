from __future__ import annotations

from pathlib import Path

from agreement import in_turn, table
from peers.generators import Guidellm, VllmBench
from peers.load import Load
from peers.sides import Places

CLOSED, OPEN = Load(8, requests=32), Load(8, requests=32, rate=2.0)


def test_each_generator_is_first_in_one_of_three_rounds() -> None:
    orders = [in_turn(["a", "b", "c"], number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_ratios_are_ours_over_theirs_within_a_round_whatever_the_order() -> None:
    rounds = [
        {"kvrelay bench": {"ttft_p50_s": 1.0}, "other": {"ttft_p50_s": 2.0}},
        {"other": {"ttft_p50_s": 4.0}, "kvrelay bench": {"ttft_p50_s": 1.0}},
    ]
    assert "| ttft_p50_s, other | 1 | 3 | 0.375 (0.250 to 0.500) |" in table(rounds)


def test_a_rate_is_the_same_load_for_all(tmp_path: Path) -> None:
    places = Places(tmp_path, None, tmp_path, tmp_path)
    vllm, guidellm = VllmBench("v", places, "http://a", "m"), Guidellm("g", places, "http://a", "m")
    assert OPEN.words == "32 requests, 2 a second, 128 in / 64 out"
    closed, opened = (" ".join(vllm.command(load, 1, tmp_path / "out")) for load in (CLOSED, OPEN))
    assert "--max-concurrency 8" in closed
    assert "--request-rate" not in closed
    assert "--request-rate 2.0 --burstiness inf" in opened
    assert "--max-concurrency" not in opened
    closed, opened = (" ".join(guidellm.command(load, 1, tmp_path / "out")) for load in (CLOSED, OPEN))
    assert "kind=concurrent,streams=8" in closed
    assert "kind=constant,rate=2.0" in opened
