"""Plans a load: which request comes when, what it asks, and what of it is shared. Pure functions of the settings.

An open loop (``--rate``, ``--trace``, ``--burst``) is a list of due times. A closed loop (``--concurrency``) has no times, but what
its n-th request is, is known all the same. Nothing depends on what the server does, so the same settings are the same load on
any server. A prompt is planned as pieces; ``bodies.py`` makes tokens or words of them when they are sent: the tokens of a
long trace would not fit into memory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.launcher.bench.spec import LoadKind, WorkloadSpec
from kvrelay.launcher.bench.trace import TraceRow

MAIN = "main"
BURST = "burst"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. The same key is the same tokens, and a shorter piece is the start of a longer one."""

    key: str
    length: int  # tokens
    is_shared: bool  # other prompts may have it too


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request."""

    stream: str
    number: int  # within its stream, from 0
    is_warmup: bool
    due_s: float | None  # since the start of the run; None: when a place of the closed loop is free
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, as planned."""
        return sum(piece.length for piece in self.pieces)


class ClosedLoop:
    """Hands out the requests of a closed loop, one after the other; knows when it is over. No clock of its own."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self.concurrency = spec.concurrency
        self._spec = spec
        self._num_given = 0
        self._num_counted = 0
        self._counted_since_s: float | None = None

    def next_request(self, now_s: float) -> PlannedRequest | None:
        """The request to send at ``now_s``; None if the run is over."""
        is_warmup = self._num_given < self._spec.warmup.num_requests or now_s < self._spec.warmup.duration_s
        if not is_warmup:
            if self._counted_since_s is None:
                self._counted_since_s = now_s
            if self._spec.num_requests is not None and self._num_counted >= self._spec.num_requests:
                return None
            if self._spec.duration_s is not None and now_s >= self._counted_since_s + self._spec.duration_s:
                return None
            self._num_counted += 1
        self._num_given += 1
        return self._request(self._num_given - 1, is_warmup=is_warmup)

    def upcoming(self) -> Iterator[PlannedRequest]:
        """What ``next_request`` will give, in its order and without an end; whether it is warm-up is not known before."""
        return (self._request(place, is_warmup=False) for place in itertools.count(self._num_given))

    def _request(self, number: int, *, is_warmup: bool) -> PlannedRequest:
        return _main_request(self._spec, number, None, is_warmup=is_warmup)


@dataclass(frozen=True, slots=True)
class Workload:
    """All that is sent."""

    timed: tuple[PlannedRequest, ...]  # in order of due_s
    closed: ClosedLoop | None


def plan_workload(spec: WorkloadSpec, trace: Sequence[TraceRow] = ()) -> Workload:
    """Plan everything. ``trace`` is for LoadKind.TRACE, as ``read_trace`` gives it."""
    closed: ClosedLoop | None = None
    if spec.kind is LoadKind.CONCURRENCY:
        assert spec.duration_s is not None or spec.burst is None, "bursts need an end"
        closed = ClosedLoop(spec)
        main: list[PlannedRequest] = []
        end_s = spec.warmup.duration_s + (spec.duration_s or 0.0)
        counted_from_s = spec.warmup.duration_s
    else:
        main = list(_trace_requests(spec, trace) if spec.kind is LoadKind.TRACE else _rate_requests(spec))
        counted_from_s, end_s = _counted_time(spec, main)
    requests = main
    if spec.burst is not None:
        bursts = _burst_requests(spec, counted_from_s, end_s)
        requests = sorted([*main, *bursts], key=lambda request: request.due_s or 0.0)
    return Workload(tuple(requests), closed)


def arrivals_s(rate: float, *, is_poisson: bool, seed: int) -> Iterator[float]:
    """Endless due times of ``rate`` requests a second: constant gaps from 0 on, or a Poisson process."""
    if not is_poisson:
        yield from (number / rate for number in itertools.count())
    chooser = random.Random(f"{seed}/arrivals")  # noqa: S311 - the same load is wanted at every run
    time_s = 0.0
    while True:
        time_s += chooser.expovariate(rate)
        yield time_s


def poisson_times_s(rate: float, start_s: float, end_s: float, seed: int) -> list[float]:
    """A Poisson process from ``start_s`` to ``end_s``, given that it has as many events as expected.

    Given their number, the events of a Poisson process are independent and uniform. Without that, 10 s at 2 a second are 11 to
    29 requests in 95 of 100 runs, and short runs measure luck.
    """
    chooser = random.Random(f"{seed}/arrivals/{start_s}")  # noqa: S311
    num = max(1, round(rate * (end_s - start_s)))
    return sorted(chooser.uniform(start_s, end_s) for _ in range(num))


def _rate_requests(spec: WorkloadSpec) -> Iterator[PlannedRequest]:
    times = arrivals_s(spec.rate, is_poisson=spec.is_poisson, seed=spec.seed)
    if spec.is_poisson and spec.duration_s is not None and not spec.warmup.num_requests:
        counted_s = spec.warmup.duration_s
        warmup = poisson_times_s(spec.rate, 0.0, counted_s, spec.seed) if counted_s else []
        times = iter([*warmup, *poisson_times_s(spec.rate, counted_s, counted_s + spec.duration_s, spec.seed)])
    for number, time_s, is_warmup in _until_end(spec, times):
        yield _main_request(spec, number, time_s, is_warmup=is_warmup)


def _trace_requests(spec: WorkloadSpec, trace: Sequence[TraceRow]) -> Iterator[PlannedRequest]:
    times = (row.timestamp / 1e3 / spec.trace_speed for row in trace)
    for number, time_s, is_warmup in _until_end(spec, times):
        row = trace[number]
        yield PlannedRequest(
            MAIN,
            number,
            is_warmup,
            time_s,
            _trace_pieces(row, number, spec.trace_block_tokens),
            max(1, row.output_length),
        )


def _until_end(spec: WorkloadSpec, times: Iterator[float]) -> Iterator[tuple[int, float, bool]]:
    """(number, due time, whether it is warm-up), up to the last request that counts.

    The counted time begins where the warm-up's seconds end, or with the first request after the warm-up's.
    """
    num_counted = 0
    counted_from_s: float | None = None
    for number, time_s in enumerate(times):
        is_warmup = spec.warmup.covers(number, time_s)
        if not is_warmup:
            if counted_from_s is None:
                counted_from_s = time_s if spec.warmup.num_requests else spec.warmup.duration_s
            if spec.num_requests is not None and num_counted >= spec.num_requests:
                return
            if spec.duration_s is not None and time_s >= counted_from_s + spec.duration_s:
                return
            num_counted += 1
        yield number, time_s, is_warmup


def _counted_time(spec: WorkloadSpec, main: Sequence[PlannedRequest]) -> tuple[float, float]:
    """From when on bursts count, and when they end: with the main load."""
    counted = [request.due_s or 0.0 for request in main if not request.is_warmup]
    first_s = counted[0] if counted and spec.warmup.num_requests else spec.warmup.duration_s
    if spec.duration_s is not None:
        return first_s, first_s + spec.duration_s
    return first_s, counted[-1] if counted else first_s


def _burst_requests(spec: WorkloadSpec, counted_from_s: float, end_s: float) -> Iterator[PlannedRequest]:
    burst = spec.burst
    assert burst is not None
    for number in itertools.count():
        time_s = (number // burst.num + 1) * burst.every_s
        if time_s >= end_s:
            return
        chooser = random.Random(f"{spec.seed}/{BURST}/{number}")  # noqa: S311
        piece = Piece(f"{BURST}/{number}", burst.input.draw(chooser), is_shared=False)
        yield PlannedRequest(BURST, number, time_s < counted_from_s, time_s, (piece,), burst.output.draw(chooser))


def _main_request(spec: WorkloadSpec, number: int, due_s: float | None, *, is_warmup: bool) -> PlannedRequest:
    # Seeded by its number: what the n-th request is does not depend on who sends the others.
    chooser = random.Random(f"{spec.seed}/{MAIN}/{number}")  # noqa: S311
    own = Piece(f"{MAIN}/{number}", spec.input.draw(chooser), is_shared=False)
    output_tokens = spec.output.draw(chooser)
    if not spec.prefix_tokens:
        return PlannedRequest(MAIN, number, is_warmup, due_s, (own,), output_tokens)
    group = chooser.randrange(spec.prefix_groups)
    prefix = Piece(f"prefix/{group}", spec.prefix_tokens, is_shared=True)
    return PlannedRequest(MAIN, number, is_warmup, due_s, (prefix, own), output_tokens)


def _trace_pieces(row: TraceRow, number: int, block_tokens: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    rest = row.input_length
    for block in row.hash_ids:
        if rest > 0:
            pieces.append(Piece(f"block/{block}", min(rest, block_tokens), is_shared=True))
            rest -= block_tokens
    if rest > 0:  # the trace names fewer blocks than the prompt has: nobody shares the rest
        pieces.append(Piece(f"{MAIN}/{number}", rest, is_shared=False))
    return tuple(pieces)
