"""What the settings of a benchmark mean: checked, with defaults chosen, texts read.

Everything that can be wrong with a load is found here, before a server is started or asked.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import describe
from kvrelay.launcher.bench.settings import BenchSettings, LoadSettings, PromptSettings
from kvrelay.launcher.bench.values import Lengths, parse_lengths, parse_pairs, parse_time_s

_DEFAULT_CONCURRENCY = 8
_DEFAULT_DURATION_S = 30.0
_DEFAULT_WARMUP = "2s"  # the first requests after a start compile and allocate


class LoadKind(enum.Enum):
    """What decides when the next request is sent."""

    RATE = "rate"
    CONCURRENCY = "concurrency"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Warmup:
    """What of a load is not counted: its first requests, or those of its first seconds."""

    num_requests: int = 0
    duration_s: float = 0.0

    def covers(self, number: int, time_s: float) -> bool:
        """Whether the ``number``-th request (from 0), at ``time_s`` after the start, is not counted."""
        return number < self.num_requests or time_s < self.duration_s


@dataclass(frozen=True, slots=True)
class Burst:
    """``num`` requests at once, every ``every_s`` seconds; the first after ``every_s``."""

    every_s: float
    num: int
    input: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A load. One of ``duration_s`` and ``num_requests`` ends it; for a trace both may be None."""

    kind: LoadKind
    input: Lengths
    output: Lengths
    rate: float = 0.0  # requests per second
    is_poisson: bool = True
    concurrency: int = 0
    trace_speed: float = 1.0
    trace_block_tokens: int = 512
    duration_s: float | None = None  # of sending what counts
    num_requests: int | None = None  # that count
    warmup: Warmup = Warmup()
    burst: Burst | None = None
    prefix_tokens: int = 0
    prefix_groups: int = 1
    seed: int = 0


def workload_spec(settings: BenchSettings) -> WorkloadSpec:
    """The load that ``settings`` ask for. Raises SettingsError."""
    load, prompt = settings.load, settings.prompt
    kind = _kind(load)
    if kind is LoadKind.TRACE:
        _check_trace(prompt)
    if load.duration_s is not None and load.requests is not None:
        raise SettingsError("--duration-s and --requests are both given; one of them ends the run, leave the other out")
    duration_s = load.duration_s
    if duration_s is None and load.requests is None and kind is not LoadKind.TRACE:
        duration_s = _DEFAULT_DURATION_S
    warmup = _warmup(load.warmup or ("0" if kind is LoadKind.TRACE else _DEFAULT_WARMUP))
    burst = None if load.burst is None else parse_burst(load.burst)
    concurrency = 0 if kind is not LoadKind.CONCURRENCY else load.concurrency or _DEFAULT_CONCURRENCY
    if burst is not None and kind is LoadKind.CONCURRENCY and (duration_s is None or warmup.num_requests):
        raise SettingsError(
            "--burst comes at fixed times, so with --concurrency the run needs fixed times too: "
            "give --duration-s instead of --requests, and --warmup in seconds"
        )
    return WorkloadSpec(
        kind=kind,
        rate=load.rate or 0.0,
        is_poisson=load.arrival == "poisson",
        concurrency=concurrency,
        trace_speed=load.trace_speed,
        trace_block_tokens=load.trace_block_tokens,
        duration_s=duration_s,
        num_requests=load.requests,
        warmup=warmup,
        burst=burst,
        input=parse_lengths(prompt.input_len, "--input-len"),
        output=parse_lengths(prompt.output_len, "--output-len"),
        prefix_tokens=prompt.prefix_tokens,
        prefix_groups=prompt.prefix_groups,
        seed=prompt.seed,
    )


def parse_burst(text: str) -> Burst:
    """``"every=5s,n=4,input=1500,output=16"``; input and output have defaults. Raises SettingsError."""
    pairs = parse_pairs(text, "--burst", ("every", "n", "input", "output"))
    missing = [key for key in ("every", "n") if key not in pairs]
    if missing:
        raise SettingsError(
            f"--burst is {text!r}; it needs {' and '.join(missing)}, as in every=5s,n=4,input=1500,output=16"
        )
    every_s = parse_time_s(pairs["every"], "--burst every")
    if every_s < 0.001:
        raise SettingsError(f"--burst every is {pairs['every']!r}; it must be at least 1ms")
    try:
        num = int(pairs["n"])
    except ValueError:
        num = 0
    if num < 1:
        raise SettingsError(f"--burst n is {pairs['n']!r}; it must be a whole number of at least 1")
    return Burst(
        every_s,
        num,
        parse_lengths(pairs.get("input", "1500"), "--burst input"),
        parse_lengths(pairs.get("output", "16"), "--burst output"),
    )


def parse_slo(text: str | None) -> dict[str, float]:
    """``"ttft=1s,itl=100ms,e2e=10s"`` in seconds. Raises SettingsError."""
    if text is None:
        return {}
    pairs = parse_pairs(text, "--slo", ("ttft", "itl", "e2e"))
    return {key: parse_time_s(value, f"--slo {key}") for key, value in pairs.items()}


def _kind(load: LoadSettings) -> LoadKind:
    given = {
        LoadKind.RATE: load.rate is not None,
        LoadKind.CONCURRENCY: load.concurrency is not None,
        LoadKind.TRACE: load.trace is not None,
    }
    chosen = [kind for kind, is_given in given.items() if is_given]
    if len(chosen) > 1:
        flags = " and ".join(f"--{kind.value}" for kind in chosen)
        raise SettingsError(f"{flags} are given; one of them decides when requests are sent, leave the others out")
    return chosen[0] if chosen else LoadKind.CONCURRENCY


def _check_trace(prompt: PromptSettings) -> None:
    """A trace has lengths and shared prefixes of its own; others must not be asked for in vain."""
    for info in describe(PromptSettings):
        is_decided = info.name in ("input_len", "output_len", "prefix_tokens", "prefix_groups")
        if is_decided and getattr(prompt, info.name) != info.default:
            raise SettingsError(
                f"{info.flag} and --trace are both given, but a trace says itself how long prompts and answers are and what they "
                f"share; leave {info.flag} out, or give --rate instead of --trace"
            )


def _warmup(text: str) -> Warmup:
    if text.strip().isdecimal():
        return Warmup(num_requests=int(text))
    try:
        return Warmup(duration_s=parse_time_s(text, "--warmup"))
    except SettingsError as error:
        raise SettingsError(f"--warmup is {text!r}; write a number of requests (16) or a time (5s)") from error
