"""Computes the figures of a run from its records. Pure.

How figures are counted:

- Warm-up requests are left out everywhere. Failed requests are left out of token counts and of all times but inter-token latency.
- TTFT runs from when a request was *due*, so a server (or a generator) that falls behind cannot hide it. In a closed loop a request
  is due when the answer before it has ended.
- Inter-token latency is the time between two chunks of one answer. All gaps of all requests count, so a pause is one long gap, not
  a slightly worse mean. Broken-off answers count too, with the time from their last chunk until the error or the timeout. TPOT, the
  mean per request, is there for comparison with other tools.
- Rates cover ``rate_window``: from the first counted request's due time until the last success or the last sending. A later
  failure, by a timeout say, does not extend it. With ``--duration-s`` the window reaches the planned end of sending.
- A request meets the SLO if it succeeded, its TTFT and end-to-end time are within their limits, and so are 99 % of its own gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.launcher.bench.records import SHORT_ANSWER, RequestRecord, RunResult

ALL = "all"
_SLO_QUANTILE = 0.99
_OUTSIDE = "network and client"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of times, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Returns None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = map(float, np.quantile(ordered, (0.5, 0.9, 0.99)))
        # Rounding of the sum may put the mean of equal values outside their range.
        mean = min(max(sum(ordered) / len(ordered), ordered[0]), ordered[-1])
        return cls(count=len(ordered), mean=mean, p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """The figures of one part of the load, or of all of it."""

    name: str
    num_requests: int
    num_ok: int
    errors: dict[str, int]  # by kind, most frequent first
    prompt_tokens: int
    output_tokens: int
    ttft: Distribution | None  # from the due time
    ttft_from_send: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None  # from the due time
    requests_per_s: float  # of successful requests
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    num_within_slo: int | None  # None: no SLO was given
    goodput_per_s: float | None
    parts: PartsSummary | None  # None: the server reports no timings


@dataclass(frozen=True, slots=True)
class PartsSummary:
    """Where the time to the first and the second token went. Each request's parts add up to what the client saw.

    kvrelay reports ``accept``, ``queue``, ``prefill``, ``transfer wait`` and ``first decode step``. ``rest`` is the remainder up to
    what its gateway saw. ``network and client`` is the remainder from there up to what the client saw.
    """

    num_requests: int
    first_token: dict[str, Distribution]  # accept, queue, prefill, rest, network and client
    first_token_whole: Distribution  # TTFT, from the due time
    second_token: dict[str, Distribution]  # transfer wait, first decode step, rest, network and client
    second_token_whole: Distribution | None  # the gap between the first two chunks


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a whole run, then of its streams if there are several."""

    window_s: float  # the time that rates cover
    streams: list[StreamSummary]

    @property
    def all(self) -> StreamSummary:
        """Every counted request."""
        return self.streams[0]

    def stream(self, name: str) -> StreamSummary | None:
        """The stream called ``name``. If the load has only one part, "main" is ``all``."""
        named = {stream.name: stream for stream in self.streams}
        return named.get(name, self.all if len(self.streams) == 1 and name == "main" else None)


def summarize(result: RunResult) -> Summary:
    """The figures of ``result``."""
    counted = [record for record in result.requests if not record.is_warmup]
    names = sorted({record.stream for record in counted}, reverse=True)  # main before burst
    of_names = [(ALL, counted)]
    if len(names) > 1:
        of_names += [(name, [record for record in counted if record.stream == name]) for name in names]
    streams = [_stream(name, records, result.duration_s, result.slo) for name, records in of_names]
    return Summary(result.duration_s, streams)


def rate_window(counted: Sequence[RequestRecord], end_s: float | None = None) -> tuple[float, float]:
    """From the first due time until the last success, or the last sending if that is later. (0, 0) without requests.

    ``end_s``: the planned end of sending, if the run has one. It counts because a closed loop sends nothing while a server hangs,
    and that time is part of the load.
    """
    if not counted:
        return 0.0, 0.0
    ends = [record.sent_s if record.error is not None else record.finished_s for record in counted]
    return min(record.due_s for record in counted), max(*ends, end_s or 0.0)


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-quantile, interpolated linearly between the two nearest values."""
    return float(np.quantile(values, q))


def gaps(record: RequestRecord) -> list[float]:
    """Every inter-token latency that the reader of one answer saw; see ``gap_ends``."""
    return [after - before for before, after in zip(record.chunk_s, gap_ends(record), strict=False)]


def gap_ends(record: RequestRecord) -> list[float]:
    """When each gap of one answer ended: with the next chunk or, for the last gap of a broken-off answer, its error or timeout."""
    broke_off = record.error is not None and record.error != SHORT_ANSWER
    return [*record.chunk_s[1:], record.finished_s] if broke_off and record.chunk_s else record.chunk_s[1:]


def ttft(record: RequestRecord) -> float | None:
    """Time to first token from the due time. None without a token."""
    return record.chunk_s[0] - record.due_s if record.chunk_s else None


def tpot(record: RequestRecord) -> float | None:
    """Mean time per output token after the first. None for an answer of fewer than two chunks or tokens."""
    if len(record.chunk_s) < 2 or record.output_tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (record.output_tokens - 1)


def meets(record: RequestRecord, slo: dict[str, float]) -> bool:
    """Whether a request meets every limit of ``slo``."""
    first = ttft(record)
    if record.error is not None or first is None:
        return False
    own_gaps = gaps(record)
    taken = {
        "ttft": first,
        "itl": percentile(own_gaps, _SLO_QUANTILE) if own_gaps else 0.0,
        "e2e": record.finished_s - record.due_s,
    }
    return all(taken[name] <= limit for name, limit in slo.items())


def _stream(name: str, records: Sequence[RequestRecord], window_s: float, slo: dict[str, float]) -> StreamSummary:
    good = [record for record in records if record.error is None]
    firsts = [value for record in good if (value := ttft(record)) is not None]
    per_s = 1.0 / window_s if window_s > 0 else 0.0
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    num_within = sum(meets(record, slo) for record in records) if slo else None
    return StreamSummary(
        name=name,
        num_requests=len(records),
        num_ok=len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft=Distribution.of(firsts),
        ttft_from_send=Distribution.of(record.chunk_s[0] - record.sent_s for record in good if record.chunk_s),
        itl=Distribution.of(gap for record in records for gap in gaps(record)),
        tpot=Distribution.of(value for record in good if (value := tpot(record)) is not None),
        e2e=Distribution.of(record.finished_s - record.due_s for record in good),
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        num_within_slo=num_within,
        goodput_per_s=None if num_within is None else num_within * per_s,
        parts=_parts(good),
    )


def _parts(records: Sequence[RequestRecord]) -> PartsSummary | None:
    first = [
        (parts, seen_s) for one in records if (seen_s := ttft(one)) is not None and (parts := _to_first(one, seen_s))
    ]
    second = [(parts, one.chunk_s[1] - one.chunk_s[0]) for one in records if (parts := _to_second(one))]
    if (whole := Distribution.of(seen_s for _, seen_s in first)) is None:
        return None
    return PartsSummary(
        num_requests=whole.count,
        first_token=_distributions([parts for parts, _ in first]),
        first_token_whole=whole,
        second_token=_distributions([parts for parts, _ in second]),
        second_token_whole=Distribution.of(seen_s for _, seen_s in second),
    )


# Each side reports differences on its own clock. The remainder is what it cannot see.


def _to_first(record: RequestRecord, seen_s: float) -> dict[str, float] | None:
    """The parts of the time to the first token. None if the server does not report them."""
    its = record.parts
    if its is None or its.ttft_s is None or its.accept_s is None or its.queue_s is None or its.prefill_s is None:
        return None
    parts = {"accept": its.accept_s, "queue": its.queue_s, "prefill": its.prefill_s}
    return parts | {"rest": its.ttft_s - sum(parts.values()), _OUTSIDE: seen_s - its.ttft_s}


def _to_second(record: RequestRecord) -> dict[str, float] | None:
    """The parts of the time from the first to the second token. None if unknown, prefilled locally, or without a second token."""
    its = record.parts
    if len(record.chunk_s) < 2 or its is None or its.ttft_s is None or its.second_token_s is None:
        return None
    if its.transfer_s is None or its.first_step_s is None:
        return None
    parts = {"transfer wait": its.transfer_s, "first decode step": its.first_step_s}
    gap_s = its.second_token_s - its.ttft_s
    seen_s = record.chunk_s[1] - record.chunk_s[0]
    return parts | {"rest": gap_s - sum(parts.values()), _OUTSIDE: seen_s - gap_s}


def _distributions(parts: Sequence[dict[str, float]]) -> dict[str, Distribution]:
    names = parts[0] if parts else ()
    found = {name: Distribution.of(one[name] for one in parts) for name in names}
    return {name: item for name, item in found.items() if item is not None}
