"""The order of waiting requests: in a gateway's line, at a prefill worker, and at a decode worker.

A request belongs to a **flow**: the requests of one API key with one priority. All flows of one priority are a **class**. Three
rules make the order:

*Classes.* The smaller priority comes first. To prevent starvation, a waiting class ages. It moves one place ahead for each second
since its last turn, or since its oldest request came if that is later. A class ten places behind a class that always has requests
gets one turn in about ten seconds. Classes age, and not requests: otherwise many old requests of a low class would all overtake a
higher class.

*Keys.* Within a class, keys share by tokens of prompt and output, in proportion to their weights: start-time fair queueing (Goyal,
Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996), with tokens counted as by Sheng et al. ("Fairness in Serving Large Language
Models", OSDI 2024). A request has a start tag in virtual time, S = max(virtual time when it came, finish tag of its flow's previous
request), and a finish tag, S + tokens / weight. The smallest start tag is next. The virtual time is the largest start tag of a
request that has begun. So a request waits for earlier requests of its key and for one request of each other key, however many they
have sent. A key may use its share up to :data:`CREDIT_S` later: a request counts as having come that much earlier. So short bursts
of a key that uses less than others do not wait for them.

A request whose start tag is beyond the virtual time is *ahead*: its key has had as much as any other key. While other keys ask too,
requests that are ahead may fill only a part of a step, or of the work that may wait at a worker. The reason: a request that comes
next can overtake waiting work, but not work that has begun. Gateways also route it by the work that they see waiting.

*Within a key* the earliest deadline comes first. Without API keys all requests have one key, and their order is that of arrival.
Otherwise clients could overtake others with short time-outs.

The number of output tokens is estimated when a request begins, and corrected when it is over (``settle``).

:func:`seniority` orders the requests that must give back what they hold, for instance KV blocks.

Writes only its own state and requests' tags. Times are seconds on the caller's clock. Use it on one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

MIN_PRIORITY, MAX_PRIORITY = -2000, 2000
AGEING_S = 1.0  # time in which a waiting class moves one place ahead
CREDIT_S = 2.0  # how much of its unused share a key may use later
_ASKS_S = 60.0  # a key counts as asking for this long after its last turn
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3


class Flow(msgspec.Struct, frozen=True):
    """A request's key, its priority, and its key's weight."""

    key: str = ""  # the API key's name; empty: there are no keys
    priority: int = 0  # smaller priorities come first
    weight: float = 1.0  # the key's share relative to other keys of its priority

    def problem(self) -> str | None:
        """The reason why the flow is invalid, naming value and limit; None if it is valid."""
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            return f"flow.priority is {self.priority}; it must be {MIN_PRIORITY} to {MAX_PRIORITY}"
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:  # false for NaN too
            return f"flow.weight is {self.weight}; it must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        return None


@dataclass(slots=True)
class Tags:
    """One request's tags, in its class's virtual time. Only :class:`FairQueue` writes them."""

    came: float | None = None  # virtual time when the request came; None: not recorded, counts as coming now
    start: float | None = None  # None: the request has not begun
    charged: float = 0.0  # tokens charged to its flow, once it has begun
    was_ahead: bool = False  # ``is_ahead`` at the time when it began


class Waiting(Protocol):
    """A request that waits or has begun."""

    @property
    def flow(self) -> Flow: ...

    @property
    def tags(self) -> Tags: ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def num_tokens(self) -> float:
        """Tokens of prompt and output, as far as they are known."""


W = TypeVar("W", bound=Waiting)


class FairQueue:
    """The order of one line. Keeps tags, not the requests."""

    def __init__(self) -> None:
        self._virtual: dict[int, float] = {}  # virtual time of each class
        self._finish: dict[tuple[int, str], float] = {}  # finish tag of each flow's last request that began
        self._turn_s: dict[int, float] = {}  # when a class last had a turn
        self._past: dict[int, deque[tuple[float, float]]] = {}  # per class: (since when, virtual time), within CREDIT_S
        self._askers: dict[int, list[tuple[str, float]]] = {}  # per class: the two keys with the latest turns, and when

    def come(self, one: Waiting) -> None:
        """Record when ``one`` came. It waits from now on."""
        past, since_s = self._past.get(one.flow.priority), one.arrival_s - CREDIT_S
        while past and len(past) > 1 and past[1][0] <= since_s:
            past.popleft()
        one.tags.came = past[0][1] if past else 0.0

    def is_ahead(self, one: Waiting, now_s: float) -> bool:
        """Whether its key has had as much as any other, while others ask too. After ``begin``: the answer at that time."""
        flow, tags = one.flow, one.tags
        if tags.start is not None:
            return tags.was_ahead
        others = (at_s for key, at_s in self._askers.get(flow.priority, ()) if key != flow.key)
        return (
            self._start(one) > self._virtual.get(flow.priority, 0.0)
            and now_s - max(others, default=-math.inf) < _ASKS_S
        )

    def begin(self, one: Waiting, now_s: float) -> None:
        """Record a request's turn. A request that begins again, because its place was taken, is not charged again."""
        flow, tags = one.flow, one.tags
        self._turn_s[flow.priority] = now_s
        if tags.start is not None:
            return
        tags.was_ahead, start = self.is_ahead(one, now_s), self._start(one)
        tags.start, tags.charged = start, one.num_tokens
        past = self._past.setdefault(flow.priority, deque([(-math.inf, 0.0)]))
        if start > past[-1][1]:
            self._virtual[flow.priority] = start
            past.append((now_s, start))
        self._finish[flow.priority, flow.key] = start + tags.charged / flow.weight
        others = [asker for asker in self._askers.get(flow.priority, ()) if asker[0] != flow.key]
        self._askers[flow.priority] = [*others[-1:], (flow.key, now_s)]

    def settle(self, one: Waiting, num_tokens: float) -> None:
        """Correct the charge of a finished request to its ``num_tokens`` of prompt and output."""
        name = (one.flow.priority, one.flow.key)
        self._finish[name] = self._finish.get(name, 0.0) + (num_tokens - one.tags.charged) / one.flow.weight
        one.tags.charged = num_tokens

    def _start(self, one: Waiting) -> float:
        """The start tag of a request that has not begun, if it is the next of its flow."""
        flow, came = one.flow, one.tags.came
        came = self._virtual.get(flow.priority, 0.0) if came is None else came
        return max(came, self._finish.get((flow.priority, flow.key), 0.0))

    def in_order(self, line: Iterable[W], now_s: float) -> list[W]:
        """``line`` in order, the next request first. Within its flow, a request that has begun comes before others."""
        flows: dict[tuple[int, str], list[W]] = {}
        since_s: dict[int, float] = {}
        for one in line:
            priority = one.flow.priority
            flows.setdefault((priority, one.flow.key), []).append(one)
            since_s[priority] = min(since_s.get(priority, math.inf), one.arrival_s)
        aged = {
            priority: priority - max(0.0, now_s - max(oldest_s, self._turn_s.get(priority, -math.inf))) / AGEING_S
            for priority, oldest_s in since_s.items()
        }
        ranked: list[tuple[float, int, float, float, int, W]] = []
        for name, members in flows.items():
            priority, key = name
            virtual, finish = self._virtual.get(priority, 0.0), self._finish.get(name, 0.0)
            members.sort(key=_in_key if key else _by_arrival)
            for one in members:
                start = one.tags.start
                if start is None:
                    start = max(virtual if one.tags.came is None else one.tags.came, finish)
                    finish = start + one.num_tokens / one.flow.weight
                ranked.append((aged[priority], priority, start, one.arrival_s, len(ranked), one))
        ranked.sort()
        return [one for *_, one in ranked]


def seniority(one: Waiting) -> float:
    """A sort key. Of requests that hold something, the one with the largest gives it up first: it is of a lower class, or younger.

    One place of priority counts as :data:`AGEING_S` of age. The value never changes, so the smallest is never interrupted.
    """
    return one.arrival_s + AGEING_S * one.flow.priority


def _in_key(one: Waiting) -> tuple[bool, float, float, float]:
    """Sort key within a named flow: requests that have begun, then the earliest deadline."""
    has_begun = one.tags.start is not None
    return (not has_begun, one.tags.start or 0.0, one.deadline_s, one.arrival_s)


def _by_arrival(one: Waiting) -> tuple[bool, float, float, float]:
    """Sort key within the flow without a name."""
    return (one.tags.start is None, one.tags.start or 0.0, one.arrival_s, 0.0)
