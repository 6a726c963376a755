from __future__ import annotations

from pathlib import Path
from typing import Any

import agreement
import pytest
from agreement import Measured, in_turn, table
from peers.generators import Guidellm, VllmBench, ours
from peers.load import Load, warm_up_of
from peers.served import ServedTtft, served_ttft
from peers.sides import Places

from tests.benchmarks.results import record, run, steps

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


_METRICS = """\
# TYPE kvrelay_time_to_first_token_seconds histogram
kvrelay_time_to_first_token_seconds_bucket{le="0.1"} 3
kvrelay_time_to_first_token_seconds_bucket{le="+Inf"} 4
kvrelay_time_to_first_token_seconds_count 4
kvrelay_time_to_first_token_seconds_sum 0.5
# TYPE kvrelay_request_duration_seconds histogram
kvrelay_request_duration_seconds_count 9
kvrelay_request_duration_seconds_sum 7
"""
_VLLM = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_count{engine="0"} 4
vllm:time_to_first_token_seconds_sum{engine="0"} 0.5
vllm:time_to_first_token_seconds_count{engine="1"} 2
vllm:time_to_first_token_seconds_sum{engine="1"} 0.25
"""


def test_what_a_server_counted_is_found_in_its_metrics() -> None:
    assert served_ttft(_METRICS) == ServedTtft(0.5, 4)
    assert served_ttft(_VLLM) == ServedTtft(0.75, 6)
    assert served_ttft("# TYPE other counter\nother_total 1\n") is None


@pytest.mark.parametrize("is_told", [True, False])
def test_a_ttft_is_the_servers_and_the_clients(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    counts = iter([ServedTtft(1.0, 10), ServedTtft(1.5, 20)])
    monkeypatch.setattr(agreement, "read_served_ttft", lambda _: next(counts) if is_told else None)
    found = agreement._with_served("http://a", lambda: Measured(10, {"ttft_mean_s": 0.06}, None))
    own = {"ttft_server_mean_s": pytest.approx(0.05), "ttft_client_mean_s": pytest.approx(0.01)} if is_told else {}
    assert found == Measured(10, {"ttft_mean_s": 0.06, **own}, None, [] if is_told else ())


def test_a_mean_of_other_answers_than_the_generators_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([ServedTtft(1.0, 10), ServedTtft(1.5, 21)])
    monkeypatch.setattr(agreement, "read_served_ttft", lambda _: next(counts))
    found = agreement._with_served("http://a", lambda: Measured(10, {"ttft_mean_s": 0.06}, None, ["another"]))
    assert found.warnings == ["another", "the server's mean is of 11 answers, the generator's figures are of 10"]


def test_nothing_served_has_no_mean() -> None:
    assert ServedTtft(1.0, 10).mean_since(ServedTtft(1.0, 10)) is None


def test_a_warm_up_asks_in_the_same_way() -> None:
    assert warm_up_of(Load(4, input_len=16, api="text")) == Load(4, 16, output_len=8, requests=4, api="text")


def test_our_figures_are_of_the_answers_that_are_counted() -> None:
    said = ours(run(record("main", 0.0, steps(0.5, 0.1, 6)), record("main", 1.0, steps(1.7, 0.1, 6))))
    assert said.num_answers == 2
    assert said.values == pytest.approx(
        {"tokens_per_s": 12 / 2.2, "ttft_p50_s": 0.6, "ttft_mean_s": 0.6, "tpot_p50_s": 0.1, "itl_p50_s": 0.1}
    )


def test_their_figures_are_in_seconds_and_of_answers_that_succeeded(tmp_path: Path) -> None:
    places = Places(tmp_path, None, tmp_path, tmp_path)
    vllm, guidellm = VllmBench("v", places, "http://a", "m"), Guidellm("g", places, "http://a", "m")
    expected = {"tokens_per_s": 70.0, "ttft_p50_s": 0.05, "ttft_mean_s": 0.06, "tpot_p50_s": 0.02}
    document: dict[str, Any] = {
        "completed": 31,
        "output_throughput": 70.0,
        "median_ttft_ms": 50.0,
        "mean_ttft_ms": 60.0,
        "median_tpot_ms": 20.0,
        "median_itl_ms": 21.0,
    }
    assert vllm.values(document) == (31, expected | {"itl_p50_s": 0.021})
    times = {"time_to_first_token_ms": {"median": 50.0, "mean": 60.0}, "inter_token_latency_ms": {"median": 20.0}}
    metrics = {name: {"successful": value, "errored": {}} for name, value in times.items()}
    metrics |= {"output_tokens_per_second": {"successful": {"mean": 70.0}}, "request_totals": {"successful": 31}}
    assert guidellm.values({"benchmarks": [{"metrics": metrics}]}) == (31, expected)
