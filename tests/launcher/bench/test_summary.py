"""The figures of a run, against ones computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.launcher.bench.records import RequestRecord, RunResult, TtftParts
from kvrelay.launcher.bench.summary import Distribution, percentile, summarize


def record(index: int = 0, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "index": index,
        "stream": "main",
        "due_s": 0.0,
        "sent_s": 0.5,
        "finished_s": 3.0,
        "prompt_tokens": 10,
        "planned_output_tokens": 3,
        "output_tokens": 3,
        "chunk_s": [1.0, 1.5, 3.0],
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def run_of(*records: RequestRecord, slo: dict[str, float] | None = None, duration_s: float = 4.0) -> RunResult:
    return RunResult(
        name="run",
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=duration_s,
        url="http://127.0.0.1:1",
        model="m",
        settings={},
        environment={},
        slo=slo or {},
        requests=list(records),
        cpu=None,
    )


def test_one_request() -> None:
    whole = summarize(run_of(record())).all
    assert (whole.num_requests, whole.num_ok, whole.errors) == (1, 1, {})
    assert whole.ttft is not None
    assert whole.ttft.p50 == 1.0
    assert whole.ttft_from_send is not None
    assert whole.ttft_from_send.p50 == 0.5
    assert whole.itl is not None
    assert (whole.itl.count, whole.itl.mean, whole.itl.max) == (2, 1.0, 1.5)
    assert whole.tpot is not None
    assert whole.tpot.p50 == 1.0
    assert whole.e2e is not None
    assert whole.e2e.max == 3.0
    assert (whole.output_tokens_per_s, whole.total_tokens_per_s, whole.requests_per_s) == (0.75, 3.25, 0.25)
    assert whole.num_within_slo is None
    assert whole.goodput_per_s is None


def test_warm_up_and_failures_have_no_times() -> None:
    failed = record(1, error="http 503", chunk_s=[], output_tokens=0)
    broken = record(2, error="timeout", chunk_s=[0.1, 9.0])
    warm = record(3, is_warmup=True, chunk_s=[70.0, 80.0])
    whole = summarize(run_of(record(), failed, broken, warm, record(4, error="timeout"))).all
    assert (whole.num_requests, whole.num_ok) == (4, 1)
    assert whole.errors == {"timeout": 2, "http 503": 1}
    assert whole.ttft is not None
    assert whole.ttft.count == 1
    assert whole.itl is not None
    assert whole.itl.max == 1.5
    assert whole.output_tokens == 3


def test_streams_are_reported_apart_and_together() -> None:
    summary = summarize(run_of(record(), record(1, stream="burst", chunk_s=[2.0], output_tokens=1)))
    assert [stream.name for stream in summary.streams] == ["all", "main", "burst"]
    burst = summary.stream("burst")
    assert burst is not None
    assert burst.itl is None
    assert burst.ttft is not None
    assert burst.ttft.max == 2.0
    alone = summarize(run_of(record()))
    assert alone.stream("main") is alone.all
    assert alone.stream("burst") is None


@pytest.mark.parametrize(
    ("slo", "meets"),
    [
        ({"ttft": 1.0}, True),
        ({"ttft": 0.9}, False),
        ({"itl": 1.5}, True),
        ({"itl": 1.2}, False),  # the mean gap is 1.0, but a reader saw 1.5
        ({"e2e": 3.0, "ttft": 2.0}, True),
        ({"e2e": 2.9}, False),
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(slo: dict[str, float], meets: bool) -> None:
    whole = summarize(run_of(record(), record(1, error="timeout"), slo=slo)).all
    assert whole.num_within_slo == int(meets)
    assert whole.goodput_per_s == int(meets) / 4


def test_an_empty_run_has_no_figures() -> None:
    whole = summarize(run_of(duration_s=0.0)).all
    assert (whole.num_requests, whole.output_tokens_per_s, whole.ttft) == (0, 0.0, None)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([0.0, 10.0], 0.9) == 9.0


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within_range(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert min(values) <= found.mean <= max(values)


SECONDS = st.floats(0, 100)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_parts_add_up_to_the_whole(rows: list[tuple[float, ...]]) -> None:
    records = [
        record(
            index,
            parts=TtftParts(
                accept_s=accept,
                queue_s=queue,
                prefill_s=prefill,
                transfer_s=transfer,
                first_step_s=step,
                ttft_s=first,
                second_token_s=first + gap,
            ),
        )
        for index, (accept, queue, prefill, transfer, step, first, gap) in enumerate(rows)
    ]
    parts = summarize(run_of(*records)).parts
    assert parts is not None
    assert parts.num_requests == len(rows)
    assert parts.second_token_whole is not None
    first_sum = sum(part.mean for part in parts.first_token.values())
    second_sum = sum(part.mean for part in parts.second_token.values())
    assert math.isclose(first_sum, parts.first_token_whole.mean, abs_tol=1e-6)
    assert math.isclose(second_sum, parts.second_token_whole.mean, abs_tol=1e-6)


def test_parts_of_local_prefill_have_no_hand_off() -> None:
    parts = TtftParts(accept_s=0.1, queue_s=0.2, prefill_s=0.3, ttft_s=0.7, second_token_s=0.9)
    found = summarize(run_of(record(parts=parts), record(1, parts=TtftParts(ttft_s=1.0)), record(2))).parts
    assert found is not None
    assert found.num_requests == 1
    assert found.first_token["rest"].p50 == pytest.approx(0.1)
    assert found.second_token == {}
    assert found.second_token_whole is None
    assert summarize(run_of(record())).parts is None
