"""Token budgets of API keys: sliding windows, reservations of requests, and the joint error of several gateways."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import pytest

from kvrelay.gateway.errors import InvalidRequestError, TokenBudgetError
from kvrelay.gateway.routing.budgets import TELL_S, OtherGateways, TokenBudget, Window
from kvrelay.wire.messages import KeyTokens
from kvrelay.worker.key_tokens import KeyTokensBoard

from ..clock import Clock

MINUTE = (1000.0, math.inf)


def budget(key: str = "alice") -> TokenBudget:
    """A budget of the only gateway."""
    return TokenBudget(key, OtherGateways("me"))


def used_elsewhere(gateway: str, number: int, minute: int, age_s: float = 0.0) -> KeyTokens:
    return KeyTokens(gateway=gateway, number=number, used={"alice": (minute, minute)}, age_s=age_s)


# -- one gateway -------------------------------------------------------------------------------------------------------


def test_a_window_forgets_what_is_older_and_nothing_else() -> None:
    window = Window(60.0)
    window.add(3, 100.2)
    window.add(4, 100.9)
    window.add(5, 110.0)
    assert [window.num_tokens(moment_s) for moment_s in (110.0, 160.9, 161.0, 170.9, 171.0)] == [12, 12, 5, 5, 0]
    window.add(1, 171.0)
    assert window.num_tokens(171.0) == 1


def test_a_request_reserves_what_it_may_use_and_pays_for_what_it_has_used() -> None:
    one = budget()
    assert one.reserve(MINUTE, 600, 600, 0.0) == 600
    with pytest.raises(
        TokenBudgetError, match="may use 1000 tokens a minute, 400 of them are left, and the request asks for 401"
    ):
        one.reserve(MINUTE, 401, 401, 1.0)
    one.settle(600, 150, 2.0)
    assert one.used(2.0) == (150, 150)
    assert one.reserve(MINUTE, 850, 850, 2.0) == 850


def test_retry_after_is_when_enough_has_left_the_window() -> None:
    one = budget()
    for now_s, num_tokens in ((0.0, 500), (30.0, 500)):
        one.settle(one.reserve(MINUTE, num_tokens, num_tokens, now_s), num_tokens, now_s)
    for least, wait_s in ((500, 21.0), (501, 51.0)):
        with pytest.raises(TokenBudgetError) as refusal:
            one.reserve(MINUTE, least, least, 40.0)
        assert refusal.value.retry_after_s == wait_s
        with pytest.raises(TokenBudgetError):
            one.reserve(MINUTE, least, least, 40.0 + wait_s - 0.1)
    assert one.reserve(MINUTE, 501, 501, 91.0) == 501


def test_what_runs_may_end_soon() -> None:
    one = budget()
    one.reserve(MINUTE, 1000, 1000, 0.0)
    with pytest.raises(TokenBudgetError) as refusal:
        one.reserve(MINUTE, 1, 1, 0.0)
    assert refusal.value.retry_after_s == 1.0


def test_a_request_that_never_fits_is_no_matter_of_time() -> None:
    with pytest.raises(
        InvalidRequestError, match="may use 1001 tokens, and this API key has 1000 a minute; ask for fewer"
    ):
        budget().reserve(MINUTE, 1001, 1001, 0.0)


def test_one_without_max_tokens_takes_what_is_left() -> None:
    one = budget()
    one.settle(one.reserve(MINUTE, 900, 900, 0.0), 900, 0.0)
    assert one.reserve(MINUTE, 11, 4096, 0.0) == 100


def test_a_day_and_a_minute_are_two_budgets() -> None:
    one, limits = budget(), (100.0, 150.0)
    one.settle(one.reserve(limits, 100, 100, 0.0), 100, 0.0)
    left = one.left(limits, 0.0)
    assert left is not None
    assert (left.limit, left.num_tokens) == (100, 0)
    assert 60 <= left.reset_s <= 62
    with pytest.raises(TokenBudgetError, match="100 tokens a minute"):
        one.reserve(limits, 10, 10, 30.0)
    one.settle(one.reserve(limits, 50, 50, 90.0), 50, 90.0)
    with pytest.raises(TokenBudgetError, match="150 tokens a day") as refusal:
        one.reserve(limits, 1, 1, 200.0)
    assert refusal.value.retry_after_s is not None
    assert 86_000 < refusal.value.retry_after_s < 90_000
    left = one.left(limits, 200.0)
    assert left is not None
    assert (left.limit, left.num_tokens) == (150, 0)


def test_without_limits_nothing_is_counted() -> None:
    one, limits = budget(), (math.inf, math.inf)
    assert one.reserve(limits, 10**9, 10**9, 0.0) == 0
    assert one.left(limits, 0.0) is None


# -- tokens used at other gateways -------------------------------------------------------------------------------------


def test_others_count_once_whatever_the_way_and_the_order() -> None:
    others = OtherGateways("me")
    for told in (
        used_elsewhere("a", 2, 20),
        used_elsewhere("a", 1, 10),
        used_elsewhere("a", 2, 20, age_s=3.0),
        used_elsewhere("b", 1, 5),
        used_elsewhere("me", 9, 500),
    ):
        others.hear(told, 100.0)
    assert others.num_tokens("alice", 0, 100.0) == 25
    assert others.num_tokens("bob", 0, 100.0) == 0
    assert others.num_live(100.0) == 2


def test_a_gateway_that_has_gone_counts_less_and_less() -> None:
    others = OtherGateways("me")
    others.hear(used_elsewhere("gone", 1, 600, age_s=20.0), 120.0)
    assert others.num_live(120.0) == 0
    assert [others.num_tokens("alice", 0, moment_s) for moment_s in (130.0, 160.0, 200.0)] == [300, 0, 0]
    assert others.num_tokens("alice", 1, 160.0) == pytest.approx(600, rel=1e-3)


def test_beside_others_a_gateway_takes_its_share_until_it_has_told() -> None:
    others = OtherGateways("me")
    others.hear(used_elsewhere("other", 1, 0), 0.0)
    one = TokenBudget("alice", others)
    taken = [one.reserve(MINUTE, 100, 100, 0.0) for _ in range(2)]
    with pytest.raises(TokenBudgetError, match="asked for much at once: 800 tokens a minute are left") as refusal:
        one.reserve(MINUTE, 100, 100, 0.0)
    assert refusal.value.retry_after_s == TELL_S
    one.on_told()
    assert one.reserve(MINUTE, 800, 800, 0.0) == 800  # the first request of a round may be of any size
    assert sum(taken) == 200


# -- several gateways, over a worker -----------------------------------------------------------------------------------

_STEP_S = 0.1
_MINUTES = 2
_LIMIT = 60_000


class Release:
    """Gateways that exchange used tokens through a worker, and a client that sends as many requests as some of them allow."""

    def __init__(self, num_gateways: int) -> None:
        self.clock = Clock()
        self.board = KeyTokensBoard(self.clock)
        self.others = [OtherGateways(str(one)) for one in range(num_gateways)]
        self.budgets = [TokenBudget("alice", others) for others in self.others]
        for one in range(num_gateways):
            self.board.join(str(one))
        self._running: deque[tuple[float, int, int, int]] = deque()  # end, gateway, reserved tokens, tokens to use
        self.used: list[tuple[float, int]] = []  # time and number of used tokens
        self._num_told = 0
        for one in range(num_gateways):
            self.tell(one)

    def tell(self, one: int) -> None:
        self._num_told += 1
        used = {"alice": self.budgets[one].used(self.clock())}
        self.board.take(str(one), KeyTokens(gateway=str(one), number=self._num_told, used=used), self._send)
        self.budgets[one].on_told()

    def _send(self, peer_id: str, told: KeyTokens) -> None:
        self.others[int(peer_id)].hear(told, self.clock())

    def ask(self, one: int, num_tokens: int, part_used: float, service_s: float) -> bool:
        try:
            num_reserved = self.budgets[one].reserve((_LIMIT, math.inf), num_tokens, num_tokens, self.clock())
        except TokenBudgetError:
            return False
        self._running.append((self.clock() + service_s, one, num_reserved, round(num_tokens * part_used)))
        return True

    def flood(
        self, asked: Sequence[int], num_tokens: int, *, part_used: float, service_s: float, at_a_time: int
    ) -> None:
        """Flood the gateways for ``_MINUTES``. Each gateway reports at other moments."""
        for step in range(round(60 * _MINUTES / _STEP_S)):
            self.clock.now_s = 100 + step * _STEP_S
            while self._running and self._running[0][0] <= self.clock():
                _, one, num_reserved, num_used = self._running.popleft()
                self.budgets[one].settle(num_reserved, num_used, self.clock())
                self.used.append((self.clock(), num_used))
            for one in range(len(self.budgets)):
                if (step + 2 * one) % round(TELL_S / _STEP_S) == 0:
                    self.tell(one)
            for one in asked:
                for _ in range(at_a_time):
                    if not self.ask(one, num_tokens, part_used, service_s):
                        break

    def most_in_a_minute(self) -> int:
        most, in_window, first = 0, 0, 0
        for now_s, num_used in self.used:
            in_window += num_used
            while self.used[first][0] <= now_s - 60:
                in_window -= self.used[first][1]
                first += 1
            most = max(most, in_window)
        return most


@pytest.mark.parametrize("num_tokens", [100, 5000])
@pytest.mark.parametrize(
    ("num_gateways", "asked"),
    [(1, [0]), (2, [0]), (2, [0, 1]), (4, [0, 1, 2, 3])],
    ids=["alone", "one of two", "both", "four"],
)
@pytest.mark.parametrize(
    ("part_used", "service_s", "at_a_time"),
    [(1.0, 0.0, 1000), (1.0, 3.0, 5), (0.4, 3.0, 1000)],
    ids=["bursts", "steady", "short answers"],
)
def test_a_key_gets_its_budget_within_the_stated_error(
    num_gateways: int, asked: list[int], num_tokens: int, part_used: float, service_s: float, at_a_time: int
) -> None:
    """A flooding key exceeds its budget by two requests for each further gateway at most, and gets 90 % of it at least."""
    release = Release(num_gateways)
    release.flood(asked, num_tokens, part_used=part_used, service_s=service_s, at_a_time=at_a_time)
    assert release.most_in_a_minute() <= _LIMIT + 2 * (num_gateways - 1) * num_tokens
    assert sum(num_used for _, num_used in release.used) >= 0.9 * _MINUTES * _LIMIT


def test_a_new_gateway_hears_what_those_before_it_have_let_in() -> None:
    """In a rolling update a new gateway starts after the old ones have left. It knows the tokens that they let in."""
    release = Release(2)
    release.ask(0, 50_000, 1.0, 60.0)
    release.tell(0)
    release.board.leave("0")
    release.board.leave("1")
    release.others[1] = OtherGateways("1")
    release.budgets[1] = TokenBudget("alice", release.others[1])
    release.board.join("1")
    release.clock.now_s += 3
    release.tell(1)
    assert not release.ask(1, 10_001, 1.0, 0.0)
    assert release.ask(1, 10_000, 1.0, 0.0)
