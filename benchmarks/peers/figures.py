"""The figures: their sides, loads, metrics and targets. Pure; ``rounds.py`` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.launcher.bench.records import RequestRecord, RunResult
from kvrelay.launcher.bench.summary import percentile
from kvrelay.launcher.bench.workload import BURST, MAIN

SETTLE_S = 1.0  # after this time in a run, all streams have begun
_LONG = 1500  # tokens of a long prompt

IDLE = "idle"
LOADED = "loaded"

Values = dict[str, float]  # "tokens_per_s" → 310.2
Results = dict[str, RunResult]  # by the name of the load


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: ``concurrency`` requests at a time, with forced ``output_len`` tokens and fresh random prompts.

    ``requests`` is the total. With ``duration_s`` the run starts requests for that time. ``burst`` is `kvrelay bench`'s option.
    """

    concurrency: int
    input_len: int | str = 128  # tokens, or a distribution as `kvrelay bench` reads it
    output_len: int | str = 64
    requests: int | None = None
    duration_s: float | None = None
    burst: str | None = None

    @property
    def words(self) -> str:
        """The load in words."""
        count = f"{self.requests} requests" if self.requests is not None else f"{self.duration_s:g} s"
        burst = "" if self.burst is None else f", burst {self.burst}"
        return f"{count}, {self.concurrency} at a time, {self.input_len} in / {self.output_len} out{burst}"

    @property
    def warm_up(self) -> Load:
        """The load before a side's first measurement: the same shapes with few tokens."""
        return Load(self.concurrency, self.input_len, output_len=8, requests=self.concurrency)


@dataclass(frozen=True, slots=True)
class Target:
    """``ours / theirs`` of ``metric`` should be at least (or at most) ``limit``. The best of ``ours`` counts.

    ``theirs`` None: ``metric`` itself has the limit. ``limit`` None: the value is only printed.
    """

    metric: str
    ours: tuple[str, ...]
    theirs: str | None
    limit: float | None = None
    is_at_most: bool = False

    def is_reached(self, value: float) -> bool | None:
        """Whether ``value`` reaches the limit; None without a limit."""
        if self.limit is None:
            return None
        return value <= self.limit if self.is_at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison. Each round measures every load on every side."""

    name: str
    title: str
    sides: tuple[str, ...]
    loads: dict[str, Load]
    values: Callable[[Results], Values]
    targets: tuple[Target, ...]
    rounds: int = 5
    warm_up: tuple[Load, ...] = ()  # further loads before the first measurement


def throughput(results: Results) -> Values:
    """Output tokens per second of all requests, and TTFT."""
    records = results[LOADED].requests
    return {
        "tokens_per_s": sum(record.output_tokens for record in records) / results[LOADED].duration_s,
        "ttft_p50_s": _median([record.chunk_s[0] - record.sent_s for record in records]),
    }


def decode_only(results: Results) -> Values:
    """Tokens per second between the first and the last token of lone streams, and TTFT."""
    records = results[LOADED].requests
    tokens = sum(record.output_tokens - 1 for record in records)
    return {
        "decode_tokens_per_s": tokens / sum(record.chunk_s[-1] - record.chunk_s[0] for record in records),
        "ttft_p50_s": _median([record.chunk_s[0] - record.sent_s for record in records]),
    }


def first_token(results: Results) -> Values:
    """TTFT."""
    return {"ttft_p50_s": _median([record.chunk_s[0] - record.sent_s for record in results[LOADED].requests])}


def stutter(results: Results) -> Values:
    """Inter-token latency of the running streams without bursts, and during bursts.

    A gap counts as "during" if it ended between the sending of the first long prompt and the end of the last one's answer. The rest
    of the run has no long prompts and would improve the quantile.
    """
    idle = [gap for record in results[IDLE].requests for _, gap in _gaps(record, SETTLE_S, float("inf"))]
    loaded = results[LOADED]
    bursts = [record for record in loaded.requests if record.stream == BURST]
    during = [gap for _, gap in gaps_of_streams(loaded, *burst_window(loaded))]
    idle_p99, burst_p99 = _quantile(idle, 0.99), _quantile(during, 0.99)
    return {
        "itl_idle_p50_s": _median(idle),
        "itl_idle_p99_s": idle_p99,
        "itl_burst_p99_s": burst_p99,
        "itl_burst_max_s": max(during),
        "itl_p99_ratio": burst_p99 / idle_p99,
        "ttft_long_p50_s": _median([record.chunk_s[0] - record.sent_s for record in bursts]),
    }


def burst_window(result: RunResult) -> tuple[float, float]:
    """From the sending of the first long prompt to the end of the last one's answer, in s since the start of the run."""
    bursts = [record for record in result.requests if record.stream == BURST]
    return min(record.sent_s for record in bursts), max(record.finished_s for record in bursts)


def gaps_of_streams(result: RunResult, from_s: float, until_s: float) -> list[tuple[float, float]]:
    """(end, length) of each gap between tokens of the main load that ended between the two times."""
    return [gap for record in result.requests if record.stream == MAIN for gap in _gaps(record, from_s, until_s)]


def _gaps(record: RequestRecord, from_s: float, until_s: float) -> list[tuple[float, float]]:
    pairs = zip(record.chunk_s, record.chunk_s[1:], strict=False)
    return [(after, after - before) for before, after in pairs if from_s <= after <= until_s]


def _median(values: list[float]) -> float:
    return _quantile(values, 0.5)


def _quantile(values: list[float], q: float) -> float:
    return percentile(sorted(values), q)


_OURS = ("kvrelay-disaggregated", "kvrelay-local")
_LOCAL = ("kvrelay-local",)
_SPLIT = ("kvrelay-disaggregated",)

FIGURES = (
    Figure(
        "total8",
        "output tokens/s, 8 requests at a time, 128 in / 64 out",
        (*_OURS, "vllm"),
        {LOADED: Load(8, requests=32)},
        throughput,
        (Target("tokens_per_s", _OURS, "vllm", 1.1),),
    ),
    Figure(
        "total32",
        "output tokens/s, 32 requests at a time, 128 in / 64 out",
        (*_OURS, "vllm"),
        {LOADED: Load(32, requests=64)},
        throughput,
        (Target("tokens_per_s", _OURS, "vllm", 1.1),),
    ),
    Figure(
        "single",
        "one stream, decode only, 128 in / 128 out",
        (*_LOCAL, "vllm", "kvrelay-int8", "llama.cpp"),
        {LOADED: Load(1, output_len=128, requests=3)},
        decode_only,
        (
            Target("decode_tokens_per_s", _LOCAL, "vllm", 1.3),
            Target("decode_tokens_per_s", ("kvrelay-int8",), "llama.cpp", 0.9),
        ),
    ),
    Figure(
        "long-prompt",
        "TTFT of a 1,500-token prompt, idle, two threads for the model",
        ("kvrelay-disaggregated-2t", *_LOCAL),
        {LOADED: Load(1, input_len=_LONG, output_len=8, requests=2)},
        first_token,
        (Target("ttft_p50_s", ("kvrelay-disaggregated-2t",), "kvrelay-local", 1.05, is_at_most=True),),
        rounds=15,
    ),
    Figure(
        "burst",
        "4 running streams while 1,500-token prompts arrive every 3 s",
        (*_OURS, "vllm", "vllm-chunks256"),
        {
            IDLE: Load(4, input_len=100, output_len=600, requests=4),
            LOADED: Load(
                4, input_len=100, output_len=1000, duration_s=13.0, burst=f"every=3s,n=1,input={_LONG},output=16"
            ),
        },
        stutter,
        targets=(
            Target("itl_p99_ratio", _SPLIT, None, 1.5, is_at_most=True),
            Target("itl_p99_ratio", _LOCAL, None),
            Target("itl_p99_ratio", ("vllm",), None),
            Target("itl_p99_ratio", ("vllm-chunks256",), None),
        ),
        warm_up=(Load(1, input_len=_LONG, output_len=8, requests=1),),
    ),
    Figure(
        "pd1",
        "prefill and decode with one core each, one stream, 128 in / 64 out",
        (*_SPLIT, "vllm-nixl"),
        {LOADED: Load(1, requests=3)},
        throughput,
        (
            Target("tokens_per_s", _SPLIT, "vllm-nixl", 4.0),
            Target("ttft_p50_s", _SPLIT, "vllm-nixl", 0.25, is_at_most=True),
        ),
    ),
    Figure(
        "pd8",
        "prefill and decode with one core each, 8 streams, 128 in / 64 out",
        (*_SPLIT, "vllm-nixl"),
        {LOADED: Load(8, requests=16)},
        throughput,
        (
            Target("tokens_per_s", _SPLIT, "vllm-nixl", 4.0),
            Target("ttft_p50_s", _SPLIT, "vllm-nixl", 0.25, is_at_most=True),
        ),
    ),
)
