"""The figures of a run against figures computed by hand."""

from __future__ import annotations

import pytest

from kvrelay.launcher.bench.records import RequestRecord, RunResult
from kvrelay.launcher.bench.summary import gaps, percentile, rate_window, summarize
from tests.launcher.bench.results import record, result


def run_of(*records: RequestRecord, slo: dict[str, float] | None = None) -> RunResult:
    from_s, until_s = rate_window(records)
    return result(requests=list(records), duration_s=until_s - from_s, slo=slo or {})


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
    assert (whole.output_tokens_per_s, whole.total_tokens_per_s, whole.requests_per_s) == (1.0, 13 / 3, 1 / 3)
    assert whole.num_within_slo is None
    assert whole.goodput_per_s is None


def test_warm_up_and_failures_have_no_times_but_gaps_that_were_seen() -> None:
    failed = record(1, error="http 503", chunk_s=[], output_tokens=0)
    broken = record(2, error="timeout", chunk_s=[0.1, 9.0], finished_s=15.0)
    warm = record(3, is_warmup=True, chunk_s=[70.0, 80.0])
    whole = summarize(run_of(record(), failed, broken, warm, record(4, error="timeout"))).all
    assert (whole.num_requests, whole.num_ok) == (4, 1)
    assert whole.errors == {"timeout": 2, "http 503": 1}
    assert whole.ttft is not None
    assert whole.ttft.count == 1
    assert whole.itl is not None
    assert (whole.itl.count, whole.itl.max) == (7, pytest.approx(8.9))  # 2 + 2 + 3 gaps
    assert whole.output_tokens == 3


def test_the_wait_that_ended_in_a_timeout_is_a_gap() -> None:
    hung = record(1, error="timeout", chunk_s=[1.0, 1.5], finished_s=16.5)
    assert gaps(hung) == [0.5, 15.0]
    assert gaps(record(2, error="short answer", finished_s=9.0)) == [0.5, 1.5]  # no gap after a complete answer
    assert gaps(record(3, error="timeout", chunk_s=[])) == []


def test_a_request_that_hangs_does_not_stretch_the_time_of_the_others() -> None:
    """39 requests are answered at once. One request hangs from the start until its timeout, long after the others."""
    answered = [
        record(number, due_s=float(number), sent_s=float(number), finished_s=number + 0.5, chunk_s=[number + 0.5])
        for number in range(1, 40)
    ]
    hung = record(0, sent_s=0.0, chunk_s=[], error="timeout", finished_s=300.0)
    assert rate_window([hung, *answered]) == (0.0, 39.5)
    assert summarize(run_of(hung, *answered)).all.output_tokens_per_s == 39 * 3 / 39.5


def test_the_time_in_which_requests_were_sent_counts_also_if_they_failed() -> None:
    """The window reaches to the last sending, so a server that stops answering half-way does not count as twice as
    fast."""
    refused = record(1, due_s=6.0, sent_s=6.0, finished_s=6.1, chunk_s=[], error="http 503")
    assert rate_window([record(), refused]) == (0.0, 6.0)
    assert rate_window([refused]) == (6.0, 6.0)
    assert rate_window([]) == (0.0, 0.0)


def test_a_closed_loop_that_stands_still_does_not_shorten_the_time() -> None:
    """All answers came in the first 3 of 60 seconds. Then the server hung, and no request was sent."""
    hung = record(1, due_s=3.0, sent_s=3.0, finished_s=303.0, chunk_s=[], error="timeout")
    assert rate_window([record(), hung], end_s=60.0) == (0.0, 60.0)
    assert rate_window([record(finished_s=70.0)], end_s=60.0) == (0.0, 70.0)


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
        ({"itl": 1.2}, False),  # the mean gap is 1.0, but the largest is 1.5
        ({"e2e": 3.0, "ttft": 2.0}, True),
        ({"e2e": 2.9}, False),
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(slo: dict[str, float], meets: bool) -> None:
    whole = summarize(run_of(record(), record(1, error="timeout"), slo=slo)).all
    assert whole.num_within_slo == int(meets)
    assert whole.goodput_per_s == int(meets) / 3


def test_an_empty_run_has_no_figures() -> None:
    whole = summarize(run_of()).all
    assert (whole.num_requests, whole.output_tokens_per_s, whole.ttft) == (0, 0.0, None)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([0.0, 10.0], 0.9) == 9.0
