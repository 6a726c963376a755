"""Plans: when requests come, what they share, that a seed repeats them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.launcher.bench.bodies import WORDS, BodySpec, BodyWriter, single_token_words
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import parse_burst, parse_slo, workload_spec
from kvrelay.launcher.bench.trace import TraceRow, read_trace
from kvrelay.launcher.bench.values import Lengths, parse_id_range, parse_lengths, parse_time_s
from kvrelay.launcher.bench.workload import PlannedRequest, Workload, arrivals_s, plan_workload


def plan(trace: list[TraceRow] | None = None, **values: Any) -> Workload:
    return plan_workload(workload_spec(build(BenchSettings, {"warmup": "0", **values})), trace or ())


def body_of(writer: BodyWriter, request: PlannedRequest) -> Any:
    return json.loads(asyncio.run(writer.make(request)))


def due(requests: tuple[PlannedRequest, ...]) -> list[float | None]:
    return [request.due_s for request in requests]


def test_constant_arrivals_with_warmup_and_duration() -> None:
    requests = plan(rate=2, arrival="constant", duration_s=2, warmup="1s").timed
    assert due(requests) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [request.is_warmup for request in requests] == [True, True, False, False, False, False]
    requests = plan(rate=2, arrival="constant", requests=3, warmup="2").timed
    assert due(requests) == [0, 0.5, 1, 1.5, 2]
    assert [request.is_warmup for request in requests] == [True, True, False, False, False]
    # The counted time begins with the first counted request.
    assert due(plan(rate=2, arrival="constant", duration_s=1, warmup="2").timed) == [0, 0.5, 1, 1.5]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = list(itertools.islice(arrivals_s(5.0, is_poisson=True, seed=1), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.03)


def test_a_poisson_load_of_a_duration_has_as_many_requests_as_its_rate_says() -> None:
    for seed in range(20):
        requests = plan(rate=2, duration_s=6, warmup="2s", seed=seed).timed
        assert [request.is_warmup for request in requests] == [True] * 4 + [False] * 12
        assert due(requests) == sorted(due(requests), key=lambda time_s: time_s or 0.0)
        assert all(0 <= (request.due_s or 0.0) < 8 for request in requests)
    # Gaps of a dense load are as spread as those of any Poisson process: deviation equals mean.
    times = [request.due_s or 0.0 for request in plan(rate=100, duration_s=100).timed]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_a_seed_repeats_a_load_and_another_one_does_not() -> None:
    values = {"rate": 5, "duration_s": 20, "input_len": "uniform:10-500", "output_len": "lognormal:50,20"}
    assert plan(**values) == plan(**values)
    assert plan(**values).timed != plan(**values, seed=1).timed


def test_bursts_come_on_top_until_the_main_load_ends() -> None:
    requests = plan(
        rate=1, arrival="constant", duration_s=10, warmup="4s", burst="every=5s,n=2,input=1500,output=16"
    ).timed
    bursts = [request for request in requests if request.stream == "burst"]
    assert due(tuple(bursts)) == [5, 5, 10, 10]
    assert {(request.prompt_tokens, request.output_tokens) for request in bursts} == {(1500, 16)}
    assert sum(request.stream == "main" for request in requests) == 14
    assert due(requests) == sorted(due(requests), key=lambda time_s: time_s or 0.0)
    early = plan(rate=1, arrival="constant", duration_s=10, warmup="4s", burst="every=3s,n=1").timed
    assert [request.is_warmup for request in early if request.stream == "burst"] == [True, False, False, False]


def test_a_closed_loop_ends_by_count() -> None:
    closed = plan(concurrency=4, requests=3, warmup="2").closed
    assert closed is not None
    requests = list(iter(lambda: closed.next_request(0.0), None))
    assert [request.is_warmup for request in requests] == [True, True, False, False, False]
    assert [request.number for request in requests] == [0, 1, 2, 3, 4]


def test_a_closed_loop_ends_by_time_counted_from_the_first_counted_request() -> None:
    closed = plan(concurrency=4, duration_s=10, warmup="5s").closed
    assert closed is not None
    given = [closed.next_request(time_s) for time_s in (0, 4.9, 7, 16.9, 17)]
    assert [request is not None and request.is_warmup for request in given] == [True, True, False, False, False]
    assert given[3] is not None
    assert given[4] is None


def test_prefixes_are_shared_within_groups_only() -> None:
    requests = plan(rate=10, duration_s=20, input_len="32", prefix_tokens=64, prefix_groups=3).timed
    writer = BodyWriter(BodySpec("m", "completions", 7))
    prompts = [body_of(writer, request)["prompt"] for request in requests]
    assert {len(prompt) for prompt in prompts} == {96}
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 3
    assert len({tuple(prompt[64:72]) for prompt in prompts}) == len(prompts)


def test_bodies_repeat_with_the_seed_and_stay_in_range() -> None:
    request = plan(rate=1, requests=1, input_len="300", output_len="9").timed[0]
    first, same, other = (body_of(BodyWriter(BodySpec("m", "completions", seed, 5, 8)), request) for seed in (1, 1, 2))
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
        writer = BodyWriter(BodySpec("m", "completions", 1, temperature=temperature, seed=seed))
        return [body_of(writer, request).get("seed") for request in requests]

    assert seeds(7, 0.0) == [None] * 5
    assert seeds(7, 0.8) == seeds(7, 0.8)
    assert len({*seeds(7, 0.8), *seeds(8, 0.8)}) == 10


def test_chats_have_a_word_for_each_token_and_nothing_a_strict_server_refuses() -> None:
    request = plan(rate=1, requests=1, input_len="20", prefix_tokens=5).timed[0]
    spec = BodySpec("m", "chat", 1, words=WORDS, ignore_eos=False)
    body = body_of(BodyWriter(spec), request)
    assert len(body["messages"][0]["content"].split()) == 25
    assert "ignore_eos" not in body


def test_text_has_a_word_for_each_token_and_shares_its_beginning() -> None:
    requests = plan(rate=1, requests=2, arrival="constant", input_len="1200", prefix_tokens=700).timed
    writer = BodyWriter(BodySpec("m", "text", 1, words=WORDS))
    first, second = (body_of(writer, request)["prompt"].split(" ") for request in requests)
    assert len(first) == len(second) == 1900
    assert first[:700] == second[:700]
    assert first[700:] != second[700:]
    assert {*first, *second} <= set(WORDS)


def test_words_that_are_several_tokens_are_left_out() -> None:
    def encode(text: str) -> list[str]:
        return [part for word in text.split() for part in ([word] if len(word) < 6 else [word[:5], word[5:]])]

    words = single_token_words(encode)
    assert words
    assert all(len(word) < 6 for word in words)
    with pytest.raises(SettingsError, match="--tokenizer: only 0 of"):
        single_token_words(list)


@pytest.mark.parametrize(
    "values", [{"input_len": "9"}, {"output_len": "9"}, {"prefix_tokens": 9}, {"prefix_groups": 9}]
)
def test_what_a_trace_says_itself_cannot_be_asked_for(values: dict[str, Any]) -> None:
    flag = "--" + next(iter(values)).replace("_", "-")
    with pytest.raises(SettingsError, match=f"{flag} and --trace are both given.* leave {flag} out"):
        workload_spec(build(BenchSettings, {"trace": "t.jsonl", **values}))
    workload_spec(build(BenchSettings, {"trace": "t.jsonl", "input_len": "128"}))  # the default is no wish


def trace_file(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path / "trace.jsonl",
        {"timestamp": 5000, "input_length": 1200, "output_length": 30, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 700, "output_length": 0, "hash_ids": [0, 3]},
        {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [0]},
    )
    rows = read_trace(path)
    spec = workload_spec(build(BenchSettings, {"trace": str(path), "trace_speed": 2}))
    requests = plan_workload(spec, rows).timed
    assert due(requests) == [0, 0.5, 2.5]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(700, 1), (1200, 30), (600, 5)]
    writer = BodyWriter(BodySpec("m", "completions", 1))
    first, second, third = (body_of(writer, request)["prompt"] for request in requests)
    assert first[:512] == second[:512] == third[:512]
    assert first[512:520] != second[512:520]
    limited = workload_spec(build(BenchSettings, {"trace": str(path), "duration_s": 2, "warmup": "1"}))
    assert [request.is_warmup for request in plan_workload(limited, rows).timed] == [True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no request of a Mooncake trace"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2 of .*: input_length must be at least 1"),
        ('{"timestamp": 1, "output_length": 1}', "input_length"),
    ],
)
def test_a_bad_trace_names_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 3, "output_length": 1}\n' + line)
    with pytest.raises(SettingsError, match=message):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .* \(No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SettingsError, match="has no requests"):
        read_trace(tmp_path / "empty")


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
        ({"warmup": "soon"}, r"--warmup is 'soon'; write a number of requests \(16\) or a time \(5s\)"),
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
        workload_spec(build(BenchSettings, values))


def test_small_texts() -> None:
    assert [parse_time_s(text, "-") for text in ("5s", "100ms", "2m", "1.5", "7us")] == [5, 0.1, 120, 1.5, 7e-6]
    assert parse_slo("ttft=1s, itl=100ms") == {"ttft": 1.0, "itl": 0.1}
    assert parse_slo(None) == {}
    assert parse_burst("every=2s,n=3,input=normal:90,5").input == Lengths("normal", 90, 5)
    assert parse_id_range("5-9", "-") == range(5, 10)
    for bad in ("-1", "9-5", "a-b", "5"):
        with pytest.raises(SettingsError, match="write LOW-HIGH"):
            parse_id_range(bad, "--token-ids")
    with pytest.raises(SettingsError, match="--slo: unknown key 'tpot'"):
        parse_slo("tpot=1s")
    with pytest.raises(SettingsError, match="--slo ttft: 'fast' is not a time"):
        parse_slo("ttft=fast")
