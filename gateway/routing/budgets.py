"""Token budgets of API keys per minute and per day, counted over all gateways of a release without a database.

A budget is a sliding window of sixty slots (N. Mahdi, "An alternative approach to rate limiting", Figma 2017): no more than the
limit in *any* minute or day. On arrival a request reserves its prompt and ``max_tokens``. At its end the real use replaces the
reservation. A request that its client gives up before the first token has used the prompts that workers got.

Each gateway counts its own requests exactly. Every ``TELL_S`` it hears what each other gateway has used
(:class:`~kvrelay.wire.messages.KeyTokens`, through workers). Between two reports it takes only its share of what is left (B.
Raghavan et al., "Cloud Control with Distributed Rate Limiting", SIGCOMM 2007). Each round divides what is then left, so shares
follow the traffic: a key that uses only one gateway has nearly all of its budget after a few rounds. The first request in a round
may take more than the share; otherwise large requests would never fit.

The error while gateways hear each other: a key may exceed its limit by two requests for each gateway beside the first. The use of a
gateway that is gone counts for one more window, decreasing evenly. A new gateway hears all that is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.gateway.errors import InvalidRequestError, TokenBudgetError
from kvrelay.wire.messages import KeyTokens

WINDOWS_S = (60.0, 86_400.0)  # the windows of the two budgets; limits are given in this order
TELL_S = 0.5

_NAMES = ("minute", "day")
_NUM_SLOTS = 60
_LIVE_S = 10 * TELL_S  # a gateway that is silent for longer counts as gone
_BUSY_RETRY_S = 1.0


class Window:
    """The tokens of the last ``length_s`` seconds, in slots. A slot is dropped as a whole when all of it is older."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._slot_s = length_s / _NUM_SLOTS
        self._slots: deque[tuple[int, int]] = deque()  # number and tokens of each slot that is not empty

    def add(self, num_tokens: int, now_s: float) -> None:
        """Add tokens that are used at ``now_s``."""
        while self._slots and self._leaves_s(self._slots[0][0]) <= now_s:
            self._slots.popleft()
        slot = int(now_s // self._slot_s)
        if self._slots and self._slots[-1][0] == slot:
            num_tokens += self._slots.pop()[1]
        self._slots.append((slot, num_tokens))

    def num_tokens(self, moment_s: float) -> int:
        """The tokens that will be in the window at ``moment_s`` (now or later) if none are added."""
        return sum(num for slot, num in self._slots if self._leaves_s(slot) > moment_s)

    def _leaves_s(self, slot: int) -> float:
        return (slot + 1) * self._slot_s + self.length_s


class OtherGateways:
    """The use that the other gateways of the release have reported; a report covers all keys."""

    def __init__(self, gateway: str) -> None:
        """``gateway``: this gateway's name, as in KeyTokens."""
        self._gateway = gateway
        self._told: dict[str, tuple[KeyTokens, float]] = {}  # by gateway: its report, and when it came

    def hear(self, told: KeyTokens, now_s: float) -> None:
        """Take in a report. A report that came before over another worker changes nothing."""
        known = self._told.get(told.gateway)
        if told.gateway == self._gateway or (known is not None and known[0].number >= told.number):
            return
        self._told[told.gateway] = told, now_s - told.age_s
        for name, (last, told_s) in list(self._told.items()):
            if now_s - told_s > (max(WINDOWS_S) if last.used else _LIVE_S):
                del self._told[name]

    def num_live(self, now_s: float) -> int:
        """The number of gateways that may be letting requests in."""
        return sum(now_s - told_s <= _LIVE_S for _, told_s in self._told.values())

    def num_tokens(self, key: str, window: int, moment_s: float) -> float:
        """A key's tokens in the others' windows at ``moment_s`` (now or later) if they let nothing more in."""
        num_tokens = 0.0
        for told, told_s in self._told.values():
            if key in told.used:
                age_s = moment_s - told_s
                part = 1.0 if age_s <= _LIVE_S else max(0.0, 1.0 - age_s / WINDOWS_S[window])
                num_tokens += part * told.used[key][window]
        return num_tokens


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of one budget."""

    limit: int
    num_tokens: int
    reset_s: float  # until the whole budget is free again if no request comes


class TokenBudget:
    """One key's budgets at one gateway. ``limits`` are tokens in each of ``WINDOWS_S``, infinite for none; they may change."""

    def __init__(self, key: str, others: OtherGateways) -> None:
        self._key = key
        self._others = others
        self._windows = [Window(length_s) for length_s in WINDOWS_S]
        self._num_reserved = 0  # by running requests
        self._num_let_in = 0  # tokens let in since the last report

    def reserve(self, limits: Sequence[float], least: int, most: int, now_s: float) -> int:
        """Reserve tokens for a request that needs ``least`` and can use up to ``most``. Returns the reserved number; ``settle``
        must follow.

        Raises TokenBudgetError if fewer are left, and InvalidRequestError if the limit is always too small.
        """
        if all(map(math.isinf, limits)):
            return 0
        num_tokens: float = most
        for window, limit in enumerate(limits):
            if least > limit:
                raise InvalidRequestError(
                    f"the request may use {least} tokens, and this API key has {limit:.0f} a {_NAMES[window]}; ask for fewer"
                )
            left = limit - self._num_used(window, now_s)
            if left < least:
                raise TokenBudgetError(
                    f"this API key may use {limit:.0f} tokens a {_NAMES[window]}, {max(0, math.floor(left))} of them are left, "
                    f"and the request asks for {least}",
                    retry_after_s=self._wait_s(window, limit - least, now_s),
                )
            share = self._share(left, now_s)
            if share < least:
                raise TokenBudgetError(
                    f"this API key has asked for much at once: {math.floor(left)} tokens a {_NAMES[window]} are left, and other "
                    "gateways may be using them; try again",
                    retry_after_s=TELL_S,
                )
            num_tokens = min(num_tokens, share)
        granted = math.floor(num_tokens)
        self._num_reserved += granted
        self._num_let_in += granted
        return granted

    def settle(self, num_reserved: int, num_used: int, now_s: float) -> None:
        """Replace a finished request's reservation by its use."""
        self._num_reserved -= num_reserved
        for window in self._windows:
            window.add(num_used, now_s)

    def used(self, now_s: float) -> tuple[int, int]:
        """The use here in a minute and in a day, reservations included, for the report to other gateways."""
        minute, day = (window.num_tokens(now_s) + self._num_reserved for window in self._windows)
        return minute, day

    def on_told(self) -> None:
        """The report has been sent."""
        self._num_let_in = 0

    def left(self, limits: Sequence[float], now_s: float) -> Left | None:
        """What is left of the budget with the least left; None without a budget."""
        lefts: list[Left] = []
        for window, limit in enumerate(limits):
            if not math.isinf(limit):
                num_left = max(0, math.floor(limit - self._num_used(window, now_s)))
                lefts.append(Left(int(limit), num_left, self._wait_s(window, 0.0, now_s)))
        return min(lefts, key=lambda left: left.num_tokens, default=None)

    def _num_used(self, window: int, now_s: float) -> float:
        here = self._windows[window].num_tokens(now_s) + self._num_reserved
        return here + self._others.num_tokens(self._key, window, now_s)

    def _share(self, left: float, now_s: float) -> float:
        """The part of what is left that may be reserved now. Rounds of two gateways overlap, so it is half of an equal share."""
        num_others = self._others.num_live(now_s)
        if not num_others or not self._num_let_in:
            return left
        return (left + self._num_let_in) / (2 * (num_others + 1)) - self._num_let_in

    def _wait_s(self, window: int, bound: float, now_s: float) -> float:
        """Seconds until at most ``bound`` tokens are in the window.

        When running requests end is unknown; the result is then small.
        """
        slot_s = WINDOWS_S[window] / _NUM_SLOTS

        def is_in_bound(slot: int) -> bool:
            moment_s = now_s + slot * slot_s
            others = self._others.num_tokens(self._key, window, moment_s)
            return self._windows[window].num_tokens(moment_s) + others <= bound

        wait_s = slot_s * bisect_left(range(_NUM_SLOTS + 1), True, key=is_in_bound)
        return max(wait_s, _BUSY_RETRY_S) if self._num_reserved else wait_s
