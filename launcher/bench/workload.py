"""Plans a load: when each request comes, its prompt and output lengths, and which prefix it shares. Pure functions of the settings.

An open loop (``--rate``, ``--burst``) is a list of due times. A closed loop (``--concurrency``) has no times, but its n-th request
is fixed too. Nothing depends on the server, so the same settings are the same load for any server. A prompt is planned as pieces.
``bodies.py`` turns them into tokens or words at sending time: all prompts of a long run would not fit into memory.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.bench.settings import BenchSettings, LoadSettings, PromptSettings
from kvrelay.launcher.bench.values import parse_lengths, parse_pairs, parse_time_s

MAIN = "main"
BURST = "burst"

_DEFAULT_CONCURRENCY = 8
_DEFAULT_DURATION_S = 30.0
_DEFAULT_WARMUP_S = 2.0  # the first requests after a start compile and allocate


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. The same key gives the same tokens; a shorter piece is the start of a longer one."""

    key: str
    length: int  # tokens


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One planned request."""

    stream: str
    number: int  # within its stream, from 0
    is_warmup: bool
    due_s: float | None  # since the start of the run; None: when the closed loop has a free place
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """The planned prompt length."""
        return sum(piece.length for piece in self.pieces)


class MainLoad:
    """Defines the n-th request of the main load, independent of its time."""

    def __init__(self, prompt: PromptSettings) -> None:
        """Raises SettingsError."""
        self._prompt = prompt
        self._input = parse_lengths(prompt.input_len, "--input-len")
        self._output = parse_lengths(prompt.output_len, "--output-len")

    def request(self, number: int, due_s: float | None, *, is_warmup: bool) -> PlannedRequest:
        """The ``number``-th request, from 0."""
        prompt = self._prompt
        chooser = random.Random(f"{prompt.seed}/{MAIN}/{number}")  # noqa: S311 - the same load is wanted at every run
        pieces = [Piece(f"{MAIN}/{number}", self._input.draw(chooser))]
        output_tokens = self._output.draw(chooser)
        if prompt.prefix_tokens:
            pieces.insert(0, Piece(f"prefix/{chooser.randrange(prompt.prefix_groups)}", prompt.prefix_tokens))
        return PlannedRequest(MAIN, number, is_warmup, due_s, tuple(pieces), output_tokens)


class ClosedLoop:
    """Hands out the requests of a closed loop in order, and ends the run. The caller passes the time."""

    def __init__(self, load: MainLoad, concurrency: int, warmup_s: float, end_s: float | None, num: int | None) -> None:
        """The run ends at ``end_s``, or after ``num`` counted requests."""
        self.concurrency = concurrency
        self._load = load
        self._warmup_s = warmup_s
        self._end_s = math.inf if end_s is None else end_s
        self._num_left = math.inf if num is None else num
        self._numbers = itertools.count()

    def next_request(self, now_s: float) -> PlannedRequest | None:
        """The request to send at ``now_s``, or None if the run is over."""
        is_warmup = now_s < self._warmup_s
        if now_s >= self._end_s or (not is_warmup and not self._num_left):
            return None
        self._num_left -= not is_warmup
        return self._load.request(next(self._numbers), None, is_warmup=is_warmup)


@dataclass(frozen=True, slots=True)
class Workload:
    """The complete plan of a run."""

    timed: tuple[PlannedRequest, ...]  # in order of due_s
    closed: ClosedLoop | None
    end_s: float | None  # when sending ends, since the start of the run; None: a number of requests ends it


def plan_workload(settings: BenchSettings) -> Workload:
    """Plan the whole load. Raises SettingsError on invalid load settings."""
    load, prompt = settings.load, settings.prompt
    if load.rate is not None and load.concurrency is not None:
        raise SettingsError(
            "--rate and --concurrency are given; one of them decides when requests are sent, leave the other out"
        )
    if load.duration_s is not None and load.requests is not None:
        raise SettingsError("--duration-s and --requests are both given; one of them ends the run, leave the other out")
    warmup_s = _DEFAULT_WARMUP_S if load.warmup is None else parse_time_s(load.warmup, "--warmup")
    end_s = None if load.duration_s is None else warmup_s + load.duration_s
    if end_s is None and load.requests is None:
        end_s = warmup_s + _DEFAULT_DURATION_S
    main_load = MainLoad(prompt)
    main: list[PlannedRequest] = []
    closed: ClosedLoop | None = None
    if load.rate is not None:
        times = _due_times_s(load, load.rate, prompt.seed, warmup_s, end_s)
        main = [main_load.request(i, time_s, is_warmup=time_s < warmup_s) for i, time_s in enumerate(times)]
    else:
        closed = ClosedLoop(main_load, load.concurrency or _DEFAULT_CONCURRENCY, warmup_s, end_s, load.requests)
    if load.burst is not None:
        last_s = end_s if closed is not None or end_s is not None else main[-1].due_s if main else 0.0
        if last_s is None:
            raise SettingsError(
                "--burst comes at fixed times, so with --concurrency the run needs a fixed end: give --duration-s "
                "instead of --requests"
            )
        main += _burst_requests(load.burst, prompt.seed, warmup_s, last_s)
    return Workload(tuple(sorted(main, key=lambda request: request.due_s or 0.0)), closed, end_s)


def _due_times_s(load: LoadSettings, rate: float, seed: int, warmup_s: float, end_s: float | None) -> Iterable[float]:
    """Due times until ``end_s``, or until ``load.requests`` have come after the warm-up.

    Given their number, the events of a Poisson process are independent and uniform. With a duration, their number is fixed to the
    rate times the duration. Otherwise 10 s at 2 requests/s would be 11 to 29 requests in 95 of 100 runs.
    """
    num_warmup = math.ceil(warmup_s * rate)
    if load.arrival == "constant":
        if end_s is not None:
            return itertools.takewhile(lambda time_s: time_s < end_s, (place / rate for place in itertools.count()))
        return (place / rate for place in range(num_warmup + (load.requests or 0)))
    chooser = random.Random(f"{seed}/arrivals")  # noqa: S311
    warmup = sorted(chooser.uniform(0.0, warmup_s) for _ in range(num_warmup))
    if end_s is not None:
        num = max(1, round(rate * (end_s - warmup_s)))
        return [*warmup, *sorted(chooser.uniform(warmup_s, end_s) for _ in range(num))]
    gaps = (chooser.expovariate(rate) for _ in range(load.requests or 0))
    return [*warmup, *(warmup_s + time_s for time_s in itertools.accumulate(gaps))]


def _burst_requests(text: str, seed: int, warmup_s: float, end_s: float) -> Iterator[PlannedRequest]:
    """The requests of ``"every=5s,n=4,input=1500,output=16"``; input and output have defaults. Raises SettingsError."""
    pairs = parse_pairs(text, "--burst", ("every", "n", "input", "output"))
    if missing := [key for key in ("every", "n") if key not in pairs]:
        raise SettingsError(
            f"--burst is {text!r}; it needs {' and '.join(missing)}, as in every=5s,n=4,input=1500,output=16"
        )
    every_s = parse_time_s(pairs["every"], "--burst every")
    if every_s < 0.001:
        raise SettingsError(f"--burst every is {pairs['every']!r}; it must be at least 1ms")
    if not pairs["n"].isdecimal() or int(pairs["n"]) < 1:
        raise SettingsError(f"--burst n is {pairs['n']!r}; it must be a whole number of at least 1")
    num = int(pairs["n"])
    input_len = parse_lengths(pairs.get("input", "1500"), "--burst input")
    output_len = parse_lengths(pairs.get("output", "16"), "--burst output")
    for number in itertools.count():
        time_s = (number // num + 1) * every_s
        if time_s >= end_s:
            return
        chooser = random.Random(f"{seed}/{BURST}/{number}")  # noqa: S311
        piece = Piece(f"{BURST}/{number}", input_len.draw(chooser))
        yield PlannedRequest(BURST, number, time_s < warmup_s, time_s, (piece,), output_len.draw(chooser))
