"""Plans: the times of requests, their shared prefixes, and their repetition by seed."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.launcher.bench.bodies import WORDS, BodyWriter
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.values import parse_id_range, parse_lengths, parse_slo, parse_time_s
from kvrelay.launcher.bench.workload import PlannedRequest, Workload, plan_workload


def plan(**values: Any) -> Workload:
    return plan_workload(build(BenchSettings, {"warmup": "0", **values}))


def bodies(requests: tuple[PlannedRequest, ...], **values: Any) -> list[Any]:
    writer = BodyWriter(build(BenchSettings, {"prompt_seed": 1, **values}), "m")
    return [json.loads(writer.make(request)) for request in requests]


def due(requests: tuple[PlannedRequest, ...]) -> list[float]:
    return [request.due_s for request in requests if request.due_s is not None]


def test_constant_arrivals_with_warmup() -> None:
    requests = plan(rate=2, arrival="constant", duration_s=2, warmup="1s").timed
    assert due(requests) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [request.is_warmup for request in requests] == [True, True, False, False, False, False]
    assert due(plan(rate=2, arrival="constant", requests=3, warmup="1s").timed) == [0, 0.5, 1, 1.5, 2]
    by_default = plan(rate=1, arrival="constant", requests=1, warmup=None).timed
    assert [request.is_warmup for request in by_default] == [True, True, False]


def test_a_poisson_load_of_a_number_has_the_gaps_of_a_poisson_process() -> None:
    requests = plan(rate=5, requests=20_000, warmup="2s").timed
    assert sum(request.is_warmup for request in requests) == 10
    gaps = [after - before for before, after in itertools.pairwise(due(requests)[10:])]
    assert len(gaps) == 19_999
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.03)


def test_a_poisson_load_of_a_duration_has_as_many_requests_as_its_rate_says() -> None:
    for seed in range(20):
        requests = plan(rate=2, duration_s=6, warmup="2s", seed=seed).timed
        assert [request.is_warmup for request in requests] == [True] * 4 + [False] * 12
        assert due(requests) == sorted(due(requests))
        assert all(0 <= time_s < 8 for time_s in due(requests))
    # In a dense load the gaps have the spread of a Poisson process: deviation equals mean.
    gaps = [after - before for before, after in itertools.pairwise(due(plan(rate=100, duration_s=100).timed))]
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_a_seed_repeats_a_load_and_another_one_does_not() -> None:
    values = {"rate": 5, "duration_s": 20, "input_len": "uniform:10-500", "output_len": "lognormal:50,20"}
    assert plan(**values).timed == plan(**values).timed
    assert plan(**values).timed != plan(**values, seed=1).timed


def test_bursts_come_on_top_until_the_main_load_ends() -> None:
    requests = plan(
        rate=1, arrival="constant", duration_s=10, warmup="4s", burst="every=5s,n=2,input=1500,output=16"
    ).timed
    bursts = [request for request in requests if request.stream == "burst"]
    assert due(tuple(bursts)) == [5, 5, 10, 10]
    assert {(request.prompt_tokens, request.output_tokens) for request in bursts} == {(1500, 16)}
    assert sum(request.stream == "main" for request in requests) == 14
    assert due(requests) == sorted(due(requests))
    early = plan(rate=1, arrival="constant", duration_s=10, warmup="4s", burst="every=3s,n=1").timed
    assert [request.is_warmup for request in early if request.stream == "burst"] == [True, False, False, False]


def test_a_closed_loop_ends_by_count() -> None:
    closed = plan(concurrency=4, requests=3, warmup="2s").closed
    assert closed is not None
    times = iter([0.0, 1.9, 2.0, 3.0, 50.0, 50.0])
    requests = list(iter(lambda: closed.next_request(next(times)), None))
    assert [request.is_warmup for request in requests] == [True, True, False, False, False]
    assert [request.number for request in requests] == [0, 1, 2, 3, 4]


def test_a_closed_loop_ends_by_time() -> None:
    closed = plan(concurrency=4, duration_s=10, warmup="5s").closed
    assert closed is not None
    given = [closed.next_request(time_s) for time_s in (0, 4.9, 7, 14.9, 15)]
    assert [request is not None and request.is_warmup for request in given] == [True, True, False, False, False]
    assert given[3] is not None
    assert given[4] is None


def test_prefixes_are_shared_within_groups_only() -> None:
    requests = plan(rate=10, duration_s=20, input_len="32", prefix_tokens=64, prefix_groups=3).timed
    prompts = [body["prompt"] for body in bodies(requests)]
    assert {len(prompt) for prompt in prompts} == {96}
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 3
    assert len({tuple(prompt[64:72]) for prompt in prompts}) == len(prompts)


def test_bodies_repeat_with_the_seed_and_stay_in_range() -> None:
    requests = plan(rate=1, requests=1, input_len="300", output_len="9").timed
    first, same, other = (bodies(requests, prompt_seed=seed, token_ids="5-8")[0] for seed in (1, 1, 2))
    assert first == same
    assert first["prompt"] != other["prompt"]
    assert set(first["prompt"]) == {5, 6, 7, 8}
    assert {key: value for key, value in first.items() if key != "prompt"} == {
        "model": "m",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 9,
    }


def test_a_temperature_brings_seeds_that_the_runs_seed_decides() -> None:
    requests = plan(rate=1, requests=5, arrival="constant").timed

    def seeds(seed: int, temperature: float) -> list[int | None]:
        return [body.get("seed") for body in bodies(requests, temperature=temperature, seed=seed)]

    assert seeds(7, 0.0) == [None] * 5
    assert seeds(7, 0.8) == seeds(7, 0.8)
    assert len({*seeds(7, 0.8), *seeds(8, 0.8)}) == 10


def test_chats_have_a_word_for_each_token_and_nothing_a_strict_server_refuses() -> None:
    requests = plan(rate=1, requests=1, input_len="20", prefix_tokens=5).timed
    (body,) = bodies(requests, api="chat", ignore_eos=False)
    assert len(body["messages"][0]["content"].split()) == 25
    assert "ignore_eos" not in body


def test_text_has_a_word_for_each_token_and_shares_its_beginning() -> None:
    requests = plan(rate=1, requests=2, arrival="constant", input_len="1200", prefix_tokens=700).timed
    first, second = (body["prompt"].split(" ") for body in bodies(requests, api="text"))
    assert len(first) == len(second) == 1900
    assert first[:700] == second[:700]
    assert first[700:] != second[700:]
    assert {*first, *second} <= set(WORDS)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("128", 128, 0), ("uniform:64-256", 160, 55.7), ("normal:512,128", 512, 128), ("lognormal:600,400", 600, 400)],
)
def test_lengths_have_the_mean_and_deviation_that_they_name(text: str, mean: float, deviation: float) -> None:
    lengths, chooser = parse_lengths(text, "--input-len"), random.Random(1)
    drawn = [lengths.draw(chooser) for _ in range(40_000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05)
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1, "concurrency": 2}, "--rate and --concurrency are given"),
        ({"rate": 1, "duration_s": 2, "requests": 3}, "--duration-s and --requests are both given"),
        ({"input_len": "0"}, "--input-len is '0'; lengths are 1 to"),
        ({"input_len": "many"}, "--input-len is 'many'; write a number of tokens"),
        ({"output_len": "uniform:9-3"}, "--output-len is 'uniform:9-3'; HIGH must be between LOW"),
        ({"output_len": "normal:9,-3"}, "a deviation is not negative"),
        ({"output_len": "normal:9"}, "--output-len is 'normal:9'; write"),
        ({"warmup": "soon"}, "--warmup: 'soon' is not a time"),
        ({"rate": 1, "burst": "n=2"}, "it needs every, as in every=5s,n=4"),
        ({"rate": 1, "burst": "every=0,n=2"}, "--burst every is '0'; it must be at least 1ms"),
        ({"rate": 1, "burst": "every=1s,n=two"}, "--burst n is 'two'; it must be a whole number"),
        ({"rate": 1, "burst": "every=1s,n=2,inputs=3"}, "--burst: unknown key 'inputs'; did you mean 'input'"),
        ({"rate": 1, "burst": "4"}, "--burst: '4' is not key=value"),
        ({"concurrency": 2, "requests": 3, "burst": "every=1s,n=2"}, "give --duration-s instead of --requests"),
        ({"rate": 0}, "--rate is 0.0; it must be at least 0.001"),
    ],
)
def test_bad_loads_say_what_to_write_instead(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(**values)


def test_small_texts() -> None:
    assert [parse_time_s(text, "-") for text in ("5s", "100ms", "2m", "1.5", "7us")] == [5, 0.1, 120, 1.5, 7e-6]
    assert parse_slo("ttft=1s, itl=100ms") == {"ttft": 1.0, "itl": 0.1}
    assert parse_slo(None) == {}
    assert len(plan(rate=1, duration_s=4, burst="every=2s,n=3,input=normal:90,5").timed) == 7
    assert parse_id_range("5-9") == range(5, 10)
    for bad in ("-1", "9-5", "a-b", "5"):
        with pytest.raises(SettingsError, match="write LOW-HIGH"):
            parse_id_range(bad)
    with pytest.raises(SettingsError, match="--slo: unknown key 'tpot'"):
        parse_slo("tpot=1s")
    with pytest.raises(SettingsError, match="--slo ttft: 'fast' is not a time"):
        parse_slo("ttft=fast")
