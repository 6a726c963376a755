"""Which workers are blamed for a failed attempt, and which ones the next attempt may use."""

from __future__ import annotations

import pytest

from kvrelay.gateway.relay.failover import Avoidance, blamed_roles
from kvrelay.wire.messages import FailureCode, Role

P, D = Role.PREFILL, Role.DECODE


def choices(avoidance: Avoidance, prefills: str, decodes: str, now_s: float = 0.0) -> list[tuple[str, str]]:
    """The allowed choices, best first. Addresses are single letters."""
    found = avoidance.choices(list(prefills), list(decodes), now_s)
    return [("".join(sorted(some)), "".join(sorted(others))) for some, others in found]


@pytest.mark.parametrize("code", FailureCode)
def test_a_decode_worker_speaks_for_itself(code: FailureCode) -> None:
    assert blamed_roles(code, D) == {D}


def test_a_prefill_worker_speaks_for_both() -> None:
    assert blamed_roles(FailureCode.INTERNAL, P) == {P}
    assert blamed_roles(FailureCode.NO_ROOM, P) == {D}
    assert blamed_roles(FailureCode.PEER_LOST, P) == {P, D}
    assert blamed_roles(FailureCode.QUEUE_FULL, P) == {P, D}


def test_a_blamed_worker_pauses() -> None:
    avoidance = Avoidance()
    avoidance.blame(("d",), 0.0, until_s=5.0)
    assert set(choices(avoidance, "p", "de")) == {("p", "e")}
    assert choices(avoidance, "p", "d") == []
    assert choices(avoidance, "", "de")[0] == ("", "e")
    assert choices(avoidance, "p", "d", now_s=5.0)[0] == ("p", "d")
    assert (avoidance.next_change_s(0.0), avoidance.next_change_s(5.0)) == (5.0, None)


def test_a_suspected_pair_is_not_used_again_but_each_of_them_with_somebody_else() -> None:
    avoidance = Avoidance()
    avoidance.blame(("p", "d"), 0.0, until_s=5.0)
    assert choices(avoidance, "p", "d") == []
    assert set(choices(avoidance, "pq", "d")) == {("q", "d")}
    assert set(choices(avoidance, "p", "de")) == {("p", "e")}
    assert choices(avoidance, "pq", "de")[0] == ("q", "e")
    assert choices(avoidance, "", "d")[-1] == ("", "d")  # without a hand-off the pair's suspicion does not count
    assert choices(avoidance, "p", "d", now_s=5.0)[0] == ("p", "d")


def test_nobody_is_blamed_for_what_nobody_did() -> None:
    avoidance = Avoidance()
    avoidance.blame((), 0.0, until_s=5.0)
    assert choices(avoidance, "p", "d")[0] == ("p", "d")
    with pytest.raises(AssertionError, match="more than a pair"):
        avoidance.blame(("a", "b", "c"), 0.0, until_s=5.0)


def test_who_is_shut_for_everybody_is_chosen_by_nobody() -> None:
    avoidance = Avoidance()
    shut = [("p",), ("d",), ("q", "e")]
    found = [(sorted(some), sorted(others)) for some, others in avoidance.choices("pq", "def", 0.0, shut)]
    assert found == [(["q"], ["f"])] * 2
    found = [
        (sorted(some), sorted(others)) for some, others in avoidance.choices("pq", "de", 0.0, [("p", "d"), ("q", "e")])
    ]
    assert found == [(["p"], ["e"]), (["q"], ["d"])]
