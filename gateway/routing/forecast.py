"""When waiting requests will get their places: simulates the line, one request after the other.

A place needs three things: a worker with little enough waiting for the prompt, a place in a decode batch, and KV blocks. The
first follows from the speed and the backlog that workers report. The others become free as requests end. When that is follows
from how long similar requests had their places: their times are spread evenly over the running requests, not drawn at random.

:class:`Pace` learns what requests cost from those that have ended. Requests are of one kind if their prompts, and the numbers
of tokens that they allow, differ by less than a factor of four. Kinds do not share estimates: a prompt token and an answer
token are different work, in different pools. An estimate is None if no request of the kind has ended, or none lately. So after
trouble, requests are tried again rather than refused.

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

_MEMORY = 32  # requests of a kind
_STALE_S = 10.0  # and as long as one request of the kind takes
_FIRST_GUESS_TOKENS = 128  # of output, before any request has ended
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly, however many are taken

Kind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that ended well. Times are from its place on workers on."""

    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float
    end_s: float


class Pace:
    """Of one gateway."""

    def __init__(self) -> None:
        self._served: dict[Kind, deque[Served]] = {}
        self._heard_s: dict[Kind, float] = {}
        self._latest: deque[Served] = deque(maxlen=_MEMORY)  # of whatever kind

    def on_served(self, kind: Kind, served: Served, now_s: float) -> None:
        """One more has ended."""
        self._served.setdefault(kind, deque(maxlen=_MEMORY)).append(served)
        self._heard_s[kind] = now_s
        self._latest.append(served)

    def output_tokens(self, kind: Kind, max_tokens: int) -> float:
        """What a request of the kind generates, as far as one can know."""
        served = self._like(kind)
        if not served:
            return min(max_tokens, _FIRST_GUESS_TOKENS)
        return min(max_tokens, sum(one.num_output_tokens for one in served) / len(served))

    def durations_s(self, kind: Kind) -> list[float]:
        """How long those of its kind had their places, the shortest first; of all, if there are none; empty if nothing is known."""
        return sorted(one.end_s for one in self._like(kind))

    def is_known(self, kind: Kind, now_s: float) -> bool:
        """Whether somebody may be refused on an estimate."""
        if (served := self._served.get(kind)) is None:
            return False
        mean_s = sum(one.end_s for one in served) / len(served)
        return now_s - self._heard_s[kind] < _STALE_S + mean_s

    def service_s(self, kind: Kind, num_prompt_tokens: int, max_tokens: int, now_s: float) -> float | None:
        """How long a request takes from its place to its end; None if that is not known."""
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
    """Which requests are alike."""
    return (num_prompt_tokens.bit_length() // 2, max_tokens.bit_length() // 2)


@dataclass(frozen=True, slots=True)
class Need:
    """What one request takes."""

    num_to_compute: int  # tokens of the prompt, by whoever is a ``Prefiller``; 0: it waits for none of them
    num_to_hold: float  # tokens of prompt and output
    durations_s: Sequence[float]  # how long requests like it had their places, the shortest first


@dataclass(frozen=True, slots=True)
class Prefiller:
    """One worker that computes prompts, whose speed is known: a prefill worker, or a decode worker in what its budget leaves."""

    num_waiting_tokens: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """What workers have now."""

    prefillers: Sequence[Prefiller]
    backlog_s: float  # of work that may wait at each of them
    free_places: float  # in batches
    free_tokens: float  # of KV
    taken: Callable[[float], float] = float  # how many of those a request of so many tokens takes

    @classmethod
    def of(cls, prefillers: Sequence[Prefiller], decodes: Sequence[WorkerView], backlog_s: float) -> Supply:
        """``decodes``: the decode workers that could be asked."""
        places = sum(view.max_taken - view.num_requests for view in decodes)
        tokens = sum(view.num_free_blocks * view.block_size for view in decodes)
        return cls(prefillers, backlog_s, places, tokens, decodes[0].tokens_for if decodes else float)


class Forecast:
    """Of one line; requests are asked about in its order."""

    def __init__(self, supply: Supply, running: Iterable[tuple[Need, float]], now_s: float) -> None:
        """``running``: what requests that have their places take, and since when they have them."""
        self._backlog_s = supply.backlog_s
        # When each of them has little enough waiting, and its speed.
        self._prefillers = [
            [now_s + one.num_waiting_tokens / one.tokens_per_s - supply.backlog_s, one.tokens_per_s]
            for one in supply.prefillers
        ]
        self._places = supply.free_places
        self._tokens, self._taken = supply.free_tokens, supply.taken
        self._at_s = now_s
        self._num_drawn = 0
        self._ends: list[tuple[float, float]] = []  # a heap: when, and how many tokens are free then
        for need, since_s in running:
            if (left_s := self._draw(need.durations_s, now_s - since_s)) is not None:
                heapq.heappush(self._ends, (now_s + left_s, self._taken(need.num_to_hold)))

    def copy(self) -> Forecast:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._prefillers = [list(one) for one in self._prefillers]
        other._ends = list(self._ends)
        return other

    def place(self, need: Need) -> float | None:
        """When the next one of the line gets its place, if all before it do; None if that cannot be known."""
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
        """How much longer one takes that has had its place for so long; None if nothing like it was seen."""
        if not durations_s:
            return None
        self._num_drawn += 1
        first = bisect_right(durations_s, elapsed_s)
        if first == len(durations_s):
            return 0.0  # longer than any: it may end at any moment
        share = (self._num_drawn * _GOLDEN) % 1.0
        return durations_s[first + int(share * (len(durations_s) - first))] - elapsed_s
