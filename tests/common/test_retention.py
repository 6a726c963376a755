"""Retention hints: their limits, and that default hints take no bytes in a message."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvrelay.common.retention import DEFAULT_PRIORITY, Retention


def test_who_says_nothing_is_default() -> None:
    assert Retention().priority == DEFAULT_PRIORITY == 35
    assert Retention().problem() is None
    assert msgspec.json.encode(Retention()) == b"{}"


@pytest.mark.parametrize("retention", [Retention(priority=0), Retention(priority=100, ttl_s=0.1)])
def test_the_limits_are_allowed(retention: Retention) -> None:
    assert retention.problem() is None


@pytest.mark.parametrize(
    ("retention", "problem"),
    [
        (Retention(priority=-1), "retention.priority is -1; it must be 0 to 100"),
        (Retention(priority=101), "retention.priority is 101; it must be 0 to 100"),
        (Retention(ttl_s=0.0), "retention.ttl_s is 0.0; it must be above 0 and finite"),
        (Retention(ttl_s=math.nan), "retention.ttl_s is nan; it must be above 0 and finite"),
        (Retention(ttl_s=math.inf), "retention.ttl_s is inf; it must be above 0 and finite"),
    ],
)
def test_what_is_wrong_is_named(retention: Retention, problem: str) -> None:
    assert retention.problem() == problem
