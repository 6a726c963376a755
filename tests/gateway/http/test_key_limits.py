"""What a key may ask: requests a second, at once and at a time, and how the file says so."""

from __future__ import annotations

import pytest

from kvrelay.gateway.errors import TooManyRequestsError
from kvrelay.gateway.http.api_keys import KeyLimits, KeyUse
from kvrelay.gateway.routing.budgets import OtherGateways, TokenBudget


def new_use() -> KeyUse:
    return KeyUse(TokenBudget("alice", OtherGateways("me")))


def test_without_limits_there_are_none() -> None:
    use = new_use()
    for _ in range(10_000):
        use.enter(KeyLimits(), 0.0)


def test_requests_a_second_and_at_once() -> None:
    limits, use = KeyLimits.parse({"requests_per_s": "2", "burst": "3"}), new_use()
    for _ in range(3):
        use.enter(limits, 100.0)
    with pytest.raises(TooManyRequestsError, match="may ask 2 times a second, 3 at once") as refusal:
        use.enter(limits, 100.0)
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    use.enter(limits, 100.5)
    with pytest.raises(TooManyRequestsError):
        use.enter(limits, 100.5)
    for _ in range(3):  # after an hour the bucket is full, not more
        use.enter(limits, 3700.0)
    with pytest.raises(TooManyRequestsError):
        use.enter(limits, 3700.0)


def test_what_is_refused_costs_nothing() -> None:
    limits, use = KeyLimits.parse({"requests_per_s": "1"}), new_use()
    use.enter(limits, 0.0)
    for tenth in range(1, 10):
        with pytest.raises(TooManyRequestsError):
            use.enter(limits, tenth / 10)
    use.enter(limits, 1.0)


def test_one_a_second_at_least_can_come_at_once() -> None:
    assert KeyLimits.parse({"requests_per_s": "0.1"}).burst == 1
    assert KeyLimits.parse({"requests_per_s": "2.5"}).burst == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speed": "1"}, "an unknown option; known are requests_per_s, burst, concurrency, tokens_per_minute"),
        ({"burst": "1.5", "requests_per_s": "1"}, "burst is not a number"),
        ({"concurrency": "0"}, "concurrency must be above 0"),
        ({"tokens_per_day": "1e6"}, "tokens_per_day is not a number"),
        ({"weight": "2000"}, "weight must be 0.001 to 1000"),
        ({"min_priority": "-2001"}, "min_priority must be -2000 to 2000"),
        ({"requests_per_s": "1.2.3"}, "requests_per_s is not a number"),
        ({"burst": "2"}, "burst means nothing without requests_per_s"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KeyLimits.parse(options)


def test_the_headers_tell_of_requests_too() -> None:
    limits, use = KeyLimits.parse({"requests_per_s": "0.01", "burst": "5"}), new_use()
    use.enter(limits, 0.0)
    use.enter(limits, 0.0)
    told = {name.decode(): value.decode() for name, value in use.headers(10.0)}
    assert told == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "3m10s",
    }
    assert dict(use.headers(199.9))[b"x-ratelimit-reset-requests"] == b"100ms"
    use.enter(KeyLimits(), 200.0)
    assert use.headers(200.0) == []
