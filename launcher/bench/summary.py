"""The figures of a run, computed from its records. Pure; nothing here knows where the records came from.

What is counted how:

- Warm-up requests are left out everywhere, failed requests out of token counts and of all times but inter-token latency.
- TTFT runs from when a request was *due*, so that a server (or a generator) that falls behind cannot hide it; in a closed loop a
  request is due when the answer before it has ended.
- Inter-token latency is the time between two chunks of one answer, every one of them, over all requests: a pause in one answer
  is one long gap, not a slightly worse mean. That is what readers saw, so answers that broke off count too, with the
  time from their last chunk until the error or the timeout. TPOT, the mean per request, is kept beside it to compare with
  tools that report that.
- Rates are over ``rate_window``: from the first counted request's due time until the last success, ramps included. A request that
  fails after that, by a timeout say, delivers nothing in its wait and must not dilute what the others got; the time in which
  requests were still sent, or were to be (``--duration-s``), belongs to the load, whatever became of them.
- A request meets the SLO if it succeeded, its TTFT and end-to-end time are within their limits, and so are 99 % of its own gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.launcher.bench.records import SHORT_ANSWER, RequestRecord, RunResult

ALL = "all"
_SLO_QUANTILE = 0.99
_OUTSIDE = "network and client"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, q) for q in (0.5, 0.9, 0.99))
        # Summing may round the mean of equal values past them.
        mean = min(max(sum(ordered) / len(ordered), ordered[0]), ordered[-1])
        return cls(count=len(ordered), mean=mean, p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """One part of the load, or all of it."""

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
    requests_per_s: float  # that succeeded
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    num_within_slo: int | None  # None: no SLO was given
    goodput_per_s: float | None
    parts: PartsSummary | None  # None: the server does not say


@dataclass(frozen=True, slots=True)
class PartsSummary:
    """Where the time to the first and the second token went; each request's parts add up to what the client saw.

    ``accept``, ``queue``, ``prefill``, ``transfer wait`` and ``first decode step`` are what kvrelay's parts say, ``rest`` is
    what is missing to what its gateway saw, and ``network and client`` what is missing from there to what the client saw.
    """

    num_requests: int
    first_token: dict[str, Distribution]  # accept, queue, prefill, rest, network and client
    first_token_whole: Distribution  # TTFT, from the due time
    second_token: dict[str, Distribution]  # transfer wait, first decode step, rest, network and client
    second_token_whole: Distribution | None  # the gap between the first two chunks


@dataclass(frozen=True, slots=True)
class Summary:
    """A run: all of it, then its streams if there are several."""

    window_s: float  # what rates are over
    streams: list[StreamSummary]

    @property
    def all(self) -> StreamSummary:
        """Every counted request."""
        return self.streams[0]

    def stream(self, name: str) -> StreamSummary | None:
        """The part of the load called ``name``; of a load of one part that is ``all``."""
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
    """From the first due time until the last success, or the last sending if that is later; (0, 0) of no requests.

    ``end_s``: until when requests were to be sent, if a time was to end them. A closed loop sends nothing while a server hangs,
    but that time was the load's all the same.
    """
    if not counted:
        return 0.0, 0.0
    ends = [record.sent_s if record.error is not None else record.finished_s for record in counted]
    return min(record.due_s for record in counted), max(*ends, end_s or 0.0)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The ``q``-quantile of sorted values, interpolated linearly between the two nearest (numpy's default)."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    between = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return min(between, ordered[high])  # the sum may round past it


def gaps(record: RequestRecord) -> list[float]:
    """Every inter-token latency that the reader of one answer saw; see ``gap_ends``."""
    return [after - before for before, after in zip(record.chunk_s, gap_ends(record), strict=False)]


def gap_ends(record: RequestRecord) -> list[float]:
    """When each gap of one answer ended: with the next chunk, or, if it broke off, the last one with the error or the timeout."""
    broke_off = record.error is not None and record.error != SHORT_ANSWER
    return [*record.chunk_s[1:], record.finished_s] if broke_off and record.chunk_s else record.chunk_s[1:]


def ttft(record: RequestRecord) -> float | None:
    """From the due time; None without a token."""
    return record.chunk_s[0] - record.due_s if record.chunk_s else None


def tpot(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None of an answer of one."""
    if len(record.chunk_s) < 2 or record.output_tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (record.output_tokens - 1)


def meets(record: RequestRecord, slo: dict[str, float]) -> bool:
    """Whether a request did what ``slo`` asks."""
    first = ttft(record)
    if record.error is not None or first is None:
        return False
    ordered = sorted(gaps(record))
    taken = {
        "ttft": first,
        "itl": percentile(ordered, _SLO_QUANTILE) if ordered else 0.0,
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
    """Differences on each side's own clock; what one side cannot see is the difference between two of them."""
    first: dict[str, list[float]] = {name: [] for name in ("accept", "queue", "prefill", "rest", _OUTSIDE)}
    second: dict[str, list[float]] = {name: [] for name in ("transfer wait", "first decode step", "rest", _OUTSIDE)}
    first_whole: list[float] = []
    second_whole: list[float] = []
    for record in records:
        part, seen_s = record.parts, ttft(record)
        if part is None or seen_s is None:
            continue
        if part.ttft_s is None or part.accept_s is None or part.queue_s is None or part.prefill_s is None:
            continue
        first["accept"].append(part.accept_s)
        first["queue"].append(part.queue_s)
        first["prefill"].append(part.prefill_s)
        first["rest"].append(part.ttft_s - part.accept_s - part.queue_s - part.prefill_s)
        first[_OUTSIDE].append(seen_s - part.ttft_s)
        first_whole.append(seen_s)
        if (
            part.second_token_s is None
            or part.transfer_s is None
            or part.first_step_s is None
            or len(record.chunk_s) < 2
        ):
            continue  # prefilled locally, or an answer of one token
        gap_s = part.second_token_s - part.ttft_s
        seen_gap_s = record.chunk_s[1] - record.chunk_s[0]
        second["transfer wait"].append(part.transfer_s)
        second["first decode step"].append(part.first_step_s)
        second["rest"].append(gap_s - part.transfer_s - part.first_step_s)
        second[_OUTSIDE].append(seen_gap_s - gap_s)
        second_whole.append(seen_gap_s)
    whole = Distribution.of(first_whole)
    if whole is None:
        return None
    return PartsSummary(
        num_requests=whole.count,
        first_token=_distributions(first),
        first_token_whole=whole,
        second_token=_distributions(second),
        second_token_whole=Distribution.of(second_whole),
    )


def _distributions(values: dict[str, list[float]]) -> dict[str, Distribution]:
    found = {name: Distribution.of(items) for name, items in values.items()}
    return {name: item for name, item in found.items() if item is not None}
