"""How conversations are split over several models."""

from __future__ import annotations

import random

import pytest

from kvrelay.gateway.routing.split import share_of

NUM = 4000


def keys() -> list[str]:
    rng = random.Random(27)
    return [f"user {rng.getrandbits(64):x}" for _ in range(NUM)]


@pytest.mark.parametrize("weights", [(95.0, 5.0), (1.0, 1.0), (2.0, 3.0, 5.0)])
def test_each_share_gets_its_part(weights: tuple[float, ...]) -> None:
    """Each model gets its share of conversations, within four standard deviations of the binomial."""
    chosen = [share_of(key, "chat", weights) for key in keys()]
    for index, weight in enumerate(weights):
        part = weight / sum(weights)
        assert abs(chosen.count(index) / NUM - part) < 4 * (part * (1 - part) / NUM) ** 0.5
    assert chosen == [share_of(key, "chat", weights) for key in keys()]


def test_only_conversations_between_the_old_and_the_new_border_change_sides() -> None:
    before = [share_of(key, "chat", (95, 5)) for key in keys()]
    after = [share_of(key, "chat", (80, 20)) for key in keys()]
    moved = [(then, now) for then, now in zip(before, after, strict=True) if then != now]
    assert set(moved) == {(0, 1)}
    assert abs(len(moved) / NUM - 0.15) < 0.025


def test_splits_under_two_names_are_independent() -> None:
    first, second = ([share_of(key, name, (1, 1)) for key in keys()] for name in ("chat", "code"))
    both = sum(a == b for a, b in zip(first, second, strict=True))
    assert abs(both / NUM - 0.5) < 4 * (0.25 / NUM) ** 0.5


def test_a_weight_of_nothing_gets_nothing() -> None:
    assert {share_of(key, "chat", (0, 1, 0)) for key in keys()} == {1}
    assert share_of("\ud800", "chat", (1, 0)) == 0  # JSON may contain lone surrogates
