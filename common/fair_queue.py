"""Whose turn it is, wherever requests wait: in a gateway's line, at a prefill worker, at a decode worker.

A request belongs to a **flow**: the requests of one API key in one class, which is a priority. Three rules make the order:

*Classes.* The smaller priority comes first. So that nobody starves, a class that waits ages: for each second since it last had a
turn, or since its oldest request came, it moves one place ahead. Ten places behind a class that always has requests, it gets one
turn in some ten seconds. A class ages, not a request: else many old ones of a low class would all pass a higher one.

*Keys.* Within a class, keys share by tokens of prompt and output, in proportion to their weights: start-time fair queueing (Goyal,
Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996), with tokens as Sheng et al. count them ("Fairness in Serving Large
Language Models", OSDI 2024). A request has a start tag in virtual time, S = max(virtual time when it came, finish tag of its flow's
request before), and a finish tag, S + tokens / weight. The smallest start tag is next; the largest of those that began is the
virtual time. So a key waits for its own requests and for one of each other key, however many those have sent. What it did not use
is saved up for :data:`CREDIT_S`: a request counts as having come so much earlier than it did. So bursts of a key that uses less
than others do not wait for them.

A request whose start tag is beyond the virtual time is *ahead*: its key has had as much as any. While others ask as well, such a
request may fill only a part of what it shares with them: of the work that may wait at a worker, of a step. For who comes next
overtakes what waits here, but waits for what is under way, and is sent by what others are seen to wait for.

*Within a key* the earliest deadline comes first. Without API keys all requests are of one key, whose order is that of arrival:
else anybody would pass the others by a short time-out.

How many tokens an answer will have is estimated when the request begins, and settled when it is over (``settle``).

Whoever has to take back what a request has already got, as blocks of KV, goes by :func:`seniority`.

Pure but for its tags; times are seconds on its owner's clock. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

MIN_PRIORITY, MAX_PRIORITY = -2000, 2000
AGEING_S = 1.0  # in which a class that waits moves one place ahead
CREDIT_S = 2.0  # of its share, that a key may use later
_ASKS_S = 60.0  # how long a key counts as one that asks, behind its last turn
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3


class Flow(msgspec.Struct, frozen=True):
    """Whose a request is, and how soon and how much they are to be served."""

    key: str = ""  # the API key's name; empty: there are no keys
    priority: int = 0  # the smaller, the earlier
    weight: float = 1.0  # of the key, among those of one priority

    def problem(self) -> str | None:
        """What is wrong with it, naming value and limit; None if nothing is."""
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            return f"flow.priority is {self.priority}; it must be {MIN_PRIORITY} to {MAX_PRIORITY}"
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:  # not a number: neither
            return f"flow.weight is {self.weight}; it must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        return None


@dataclass(slots=True)
class Tags:
    """Of one request, in its class's virtual time. Written by :class:`FairQueue` alone."""

    came: float | None = None  # None: it comes now
    start: float | None = None  # None: its turn has not come
    charged: float = 0.0  # tokens, once its turn has come
    was_ahead: bool = False  # when its turn came


class Waiting(Protocol):
    """What waits, or has begun."""

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
        """Of prompt and output, as far as one knows."""


W = TypeVar("W", bound=Waiting)


class FairQueue:
    """The order of one line. Keeps tags, not the requests."""

    def __init__(self) -> None:
        self._virtual: dict[int, float] = {}  # time of each class
        self._finish: dict[tuple[int, str], float] = {}  # tag of each flow's last request that began
        self._turn_s: dict[int, float] = {}  # when a class last had a turn
        self._past: dict[
            int, deque[tuple[float, float]]
        ] = {}  # since when the virtual time of each class was what, in CREDIT_S
        self._askers: dict[
            int, list[tuple[str, float]]
        ] = {}  # the two keys of each class that had the last turns, and when

    def come(self, one: Waiting) -> None:
        """It waits from now on."""
        past, since_s = self._past.get(one.flow.priority), one.arrival_s - CREDIT_S
        while past and len(past) > 1 and past[1][0] <= since_s:
            past.popleft()
        one.tags.came = past[0][1] if past else 0.0

    def is_ahead(self, one: Waiting, now_s: float) -> bool:
        """Whether its key has had as much as any, while others ask as well. Of one that has begun: whether it had, then."""
        flow, tags = one.flow, one.tags
        if tags.start is not None:
            return tags.was_ahead
        others = (at_s for key, at_s in self._askers.get(flow.priority, ()) if key != flow.key)
        return (
            self._start(one) > self._virtual.get(flow.priority, 0.0)
            and now_s - max(others, default=-math.inf) < _ASKS_S
        )

    def begin(self, one: Waiting, now_s: float) -> None:
        """Its turn has come. One that has had its turn, and was taken back, pays nothing again."""
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
        """It is over, with so many tokens of prompt and output: more or fewer than its flow was charged for."""
        name = (one.flow.priority, one.flow.key)
        self._finish[name] = self._finish.get(name, 0.0) + (num_tokens - one.tags.charged) / one.flow.weight
        one.tags.charged = num_tokens

    def _start(self, one: Waiting) -> float:
        """The start tag of one that has not begun, if it is the next of its flow."""
        flow, came = one.flow, one.tags.came
        came = self._virtual.get(flow.priority, 0.0) if came is None else came
        return max(came, self._finish.get((flow.priority, flow.key), 0.0))

    def in_order(self, line: Iterable[W], now_s: float) -> list[W]:
        """``line``, the next one first, as long as nobody comes. Those that have begun come before the others of their flow."""
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
    """The larger it is, the sooner it gives up what it holds: it is of a lower class, or younger.

    A place of priority is worth :data:`AGEING_S` of age. So it never changes, and the one with the smallest always goes on.
    """
    return one.arrival_s + AGEING_S * one.flow.priority


def _in_key(one: Waiting) -> tuple[bool, float, float, float]:
    """Of a flow with a name: those that have begun, then the earliest deadline."""
    has_begun = one.tags.start is not None
    return (not has_begun, one.tags.start or 0.0, one.deadline_s, one.arrival_s)


def _by_arrival(one: Waiting) -> tuple[bool, float, float, float]:
    """Of the flow without a name."""
    return (one.tags.start is None, one.tags.start or 0.0, one.arrival_s, 0.0)
