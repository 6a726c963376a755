"""Forecasts when waiting requests get their places: it simulates the line, one request after the other.

A place needs three things: a worker with a short enough backlog for the prompt, a place in a decode batch, and KV blocks. The first
follows from the speed and backlog that workers report. The others become free as requests end. When they end is estimated from how
long similar requests had their places. These durations are spread evenly over the running requests, not drawn at random.

:class:`Pace` learns from finished requests what requests cost. Requests are of one kind if their prompts, and the numbers of tokens
that they allow, differ by less than a factor of four. Kinds do not share estimates, because prompt tokens and answer tokens are
different work in different pools. An estimate is None if no request of the kind has ended, or none lately. So after an outage,
requests are tried again rather than refused.

Pure; times are seconds on one clock.
"""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrelay.gateway.workers.load import WorkerView

_MEMORY = 32  # remembered requests of a kind
_STALE_S = 10.0  # an estimate is stale after this plus the duration of one request
_FIRST_GUESS_TOKENS = 128  # estimated output before any request has ended
# The golden ratio's fraction: its multiples modulo 1 are spread evenly, however many are taken.
_GOLDEN = 0.6180339887498949

Kind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Served:
    """A request that ended well. Its times begin when it got its place."""

    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float
    end_s: float


class Pace:
    """What requests of one gateway cost."""

    def __init__(self) -> None:
        self._served: dict[Kind, deque[Served]] = {}
        self._heard_s: dict[Kind, float] = {}
        self._latest: deque[Served] = deque(maxlen=_MEMORY)  # requests of any kind

    def on_served(self, kind: Kind, served: Served, now_s: float) -> None:
        """Add a finished request."""
        self._served.setdefault(kind, deque(maxlen=_MEMORY)).append(served)
        self._heard_s[kind] = now_s
        self._latest.append(served)

    def output_tokens(self, kind: Kind, max_tokens: int) -> float:
        """The estimated number of tokens that a request of the kind generates."""
        served = self._like(kind)
        if not served:
            return min(max_tokens, _FIRST_GUESS_TOKENS)
        return min(max_tokens, sum(one.num_output_tokens for one in served) / len(served))

    def durations_s(self, kind: Kind) -> list[float]:
        """How long requests of the kind had their places, shortest first. If there are none: of all kinds.

        Empty if nothing is known.
        """
        return sorted(one.end_s for one in self._like(kind))

    def is_known(self, kind: Kind, now_s: float) -> bool:
        """Whether the estimate is good enough to refuse a request."""
        if (served := self._served.get(kind)) is None:
            return False
        mean_s = sum(one.end_s for one in served) / len(served)
        return now_s - self._heard_s[kind] < _STALE_S + mean_s

    def service_s(self, kind: Kind, num_prompt_tokens: int, max_tokens: int, now_s: float) -> float | None:
        """The estimated seconds from a request's place to its end; None if unknown."""
        if not self.is_known(kind, now_s):
            return None
        served = self._served[kind]
        by_prompt_token = sum(one.first_token_s for one in served) / sum(one.num_prompt_tokens for one in served)
        by_output_token = sum(one.end_s - one.first_token_s for one in served) / sum(
            one.num_output_tokens for one in served
        )
        return num_prompt_tokens * by_prompt_token + self.output_tokens(kind, max_tokens) * by_output_token

    def _like(self, kind: Kind) -> deque[Served]:
        return self._served.get(kind, self._latest)


def kind_of(num_prompt_tokens: int, max_tokens: int) -> Kind:
    """The kind that a request belongs to."""
    return (num_prompt_tokens.bit_length() // 2, max_tokens.bit_length() // 2)


@dataclass(frozen=True, slots=True)
class Need:
    """What one request needs."""

    num_to_compute: int  # prompt tokens for a ``Prefiller`` to compute; 0: it needs none
    num_to_hold: float  # tokens of prompt and output
    durations_s: Sequence[float]  # how long similar requests had their places, shortest first


@dataclass(frozen=True, slots=True)
class Prefiller:
    """A worker of known speed that computes prompts: a prefill worker, or a decode worker within its inter-token budget."""

    num_waiting_tokens: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """What the workers have free."""

    prefillers: Sequence[Prefiller]
    backlog_s: float  # how much work may wait at each prefiller
    free_places: float  # in batches
    free_tokens: float  # of KV
    taken: Callable[[float], float] = float  # maps a request's length to the ``free_tokens`` that it takes

    @classmethod
    def of(cls, prefillers: Sequence[Prefiller], decodes: Sequence[WorkerView], backlog_s: float) -> Supply:
        """``decodes``: the decode workers that can be used."""
        places = sum(view.max_taken - view.num_requests for view in decodes)
        tokens = sum(view.num_free_blocks * view.block_size for view in decodes)
        return cls(prefillers, backlog_s, places, tokens, decodes[0].tokens_for if decodes else float)


class Forecast:
    """The forecast of one line. Ask about its requests in order."""

    def __init__(self, supply: Supply, running: Iterable[tuple[Need, float]], now_s: float) -> None:
        """``running``: what each request with a place needs, and since when it has its place."""
        self._backlog_s = supply.backlog_s
        # For each prefiller: when its backlog is short enough, and its speed.
        self._prefillers = [
            [now_s + one.num_waiting_tokens / one.tokens_per_s - supply.backlog_s, one.tokens_per_s]
            for one in supply.prefillers
        ]
        self._places = supply.free_places
        self._tokens, self._taken = supply.free_tokens, supply.taken
        self._at_s = now_s
        self._num_drawn = 0
        self._ends: list[tuple[float, float]] = []  # a heap: when a request ends, and how many tokens it frees
        for need, since_s in running:
            if (left_s := self._draw(need.durations_s, now_s - since_s)) is not None:
                heapq.heappush(self._ends, (now_s + left_s, self._taken(need.num_to_hold)))

    def copy(self) -> Forecast:
        """An independent copy that continues from here."""
        other = copy.copy(self)
        other._prefillers = [list(one) for one in self._prefillers]
        other._ends = list(self._ends)
        return other

    def place(self, need: Need) -> float | None:
        """When the next request of the line gets its place, after all before it; None if unknown."""
        at_s, num_taken = self._at_s, self._taken(need.num_to_hold)
        prefiller = min(self._prefillers, default=None) if need.num_to_compute else None
        if prefiller is not None:
            at_s = max(at_s, prefiller[0])
        while self._places < 1 or self._tokens < num_taken or (self._ends and self._ends[0][0] <= at_s):
            if not self._ends:
                return None
            end_s, num_tokens = heapq.heappop(self._ends)
            self._places += 1
            self._tokens += num_tokens
            at_s = max(at_s, end_s)
        if prefiller is not None:
            prefiller[0] = max(prefiller[0], at_s - self._backlog_s) + need.num_to_compute / prefiller[1]
        self._at_s = at_s
        self._places -= 1
        self._tokens -= num_taken
        if (left_s := self._draw(need.durations_s, 0.0)) is not None:
            heapq.heappush(self._ends, (at_s + left_s, num_taken))
        return at_s

    def _draw(self, durations_s: Sequence[float], elapsed_s: float) -> float | None:
        """How much longer a request runs that has had its place for ``elapsed_s``; None without any duration to go by."""
        if not durations_s:
            return None
        self._num_drawn += 1
        first = bisect_right(durations_s, elapsed_s)
        if first == len(durations_s):
            return 0.0  # it has run longer than any known one, so it may end at any time
        share = (self._num_drawn * _GOLDEN) % 1.0
        return durations_s[first + int(share * (len(durations_s) - first))] - elapsed_s
