"""Circuit breakers: when a worker gets only probes, and when it is used again."""

from __future__ import annotations

import pytest

from kvrelay.gateway.routing.breaker import BreakerState, CircuitBreakers, Part, Trial

PAIR = ("p", "d")
P, D = ("p",), ("d",)


class Breakers(CircuitBreakers):
    """Circuit breakers that keep their notifications."""

    def __init__(self) -> None:
        self.told: list[tuple[Part, bool]] = []
        super().__init__(lambda part, is_open: self.told.append((part, is_open)))

    def fail(self, cause: str, blamed: Part, now_s: float, part: Part = PAIR) -> None:
        trial = self.begin(cause, part, now_s)
        self.on_failure(trial, blamed, now_s)
        self.on_end(trial)


@pytest.mark.parametrize("blamed", [P, D, PAIR])
def test_three_different_requests_open_it_and_one_may_probe(blamed: Part) -> None:
    breakers = Breakers()
    for cause in ("a", "a", "a", "b"):
        breakers.fail(cause, blamed, 0.0)
    assert not breakers.shut(0.0)
    breakers.fail("c", blamed, 0.0)
    assert breakers.shut(0.99) == {blamed}
    assert breakers.shut(1.0) == set()
    probe = breakers.begin("d", PAIR, 1.0)
    assert breakers.shut(1.0) == {blamed}
    assert breakers.states() == {blamed: BreakerState.PROBING}
    probe.hand_over_succeeded()
    probe.decode_succeeded()
    breakers.on_end(probe)
    assert not breakers.is_any
    assert breakers.told == [(blamed, True), (blamed, False)]


def opened() -> tuple[Breakers, Trial]:
    """An open breaker of ``D``, and a probe that began at 10.0."""
    breakers = Breakers()
    for cause in "abc":
        breakers.fail(cause, D, 0.0)
    return breakers, breakers.begin("probe", PAIR, 10.0)


def test_after_a_failed_probe_the_pause_is_longer_up_to_a_bound() -> None:
    breakers, probe = opened()
    now_s = 10.0
    for pause_s in (2, 4, 8, 16, 30, 30):
        breakers.on_failure(probe, D, now_s)
        breakers.on_end(probe)
        assert (breakers.shut(now_s + pause_s - 0.01), breakers.shut(now_s + pause_s)) == ({D}, set())
        now_s += pause_s
        probe = breakers.begin("next", PAIR, now_s)
    assert breakers.told == [(D, True)]


def test_a_probe_that_showed_nothing_makes_room_for_the_next() -> None:
    """A probe ends without success or failure, as when its client leaves. The next request may be a probe."""
    breakers, probe = opened()
    breakers.on_end(probe)
    assert not breakers.shut(10.0)
    breakers.begin("next", PAIR, 10.0)
    assert breakers.shut(10.0) == {D}


def test_others_than_the_probe_neither_close_it_nor_prolong_its_pause() -> None:
    breakers, probe = opened()
    late = breakers.begin("late", PAIR, 10.5)
    late.decode_succeeded()
    breakers.on_failure(late, D, 11.0)
    breakers.on_end(late)
    assert breakers.states() == {D: BreakerState.PROBING}
    probe.decode_succeeded()
    assert not breakers.is_any


def test_what_goes_well_counts_against_failures_before_it_began() -> None:
    breakers = Breakers()
    old = breakers.begin("old", PAIR, 0.0)
    breakers.fail("a", D, 1.0)
    breakers.fail("b", D, 2.0)
    old.decode_succeeded()  # a success that began before the failures does not count
    breakers.fail("c", D, 3.0)
    assert breakers.shut(3.0) == {D}
    breakers = Breakers()
    breakers.fail("a", D, 1.0)
    breakers.fail("b", D, 2.0)
    breakers.begin("new", PAIR, 2.5).decode_succeeded()
    assert not breakers.is_any
    breakers.fail("c", D, 3.0)
    breakers.fail("d", D, 63.5)
    breakers.fail("e", D, 64.0)
    assert not breakers.shut(64.0), "what lies a minute back"


def test_a_worker_that_comes_anew_or_is_gone_is_forgotten() -> None:
    for up_since_s in ({"p": 0.0, "d": 5.0}, {"p": 0.0}):
        breakers, _ = opened()
        breakers.keep({"p": 0.0, "d": -1.0})
        assert breakers.is_any
        breakers.keep(up_since_s)
        assert not breakers.is_any
        assert breakers.told == [(D, True), (D, False)]


def test_without_a_prefill_worker_only_the_decode_worker_is_tried() -> None:
    breakers = Breakers()
    for cause in "abc":
        breakers.fail(cause, D, 0.0, part=D)
    probe = breakers.begin("d", D, 1.0)
    probe.hand_over_succeeded()
    assert breakers.shut(1.0) == {D}
    probe.decode_succeeded()
    assert not breakers.is_any
