"""Who waits, who runs, and when keys' debts are forgotten."""

from __future__ import annotations

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.places import Places


def sequence(name: str, arrival_s: float, num_tokens: int = 100) -> Sequence:
    return Sequence(name, 1, [5] * num_tokens, num_tokens, SamplingParams(max_tokens=8), arrival_s)


def test_one_that_gives_way_alone_stays_before_those_that_come_behind_it() -> None:
    """Nobody runs and nobody waits in that moment; yet the worker is not idle."""
    places, earlier, victim = Places(), sequence("earlier", 0.0), sequence("victim", 1.0)
    for one in (earlier, victim):
        places.wait(one)
        places.begin(one, one.arrival_s)
    places.leave(earlier)
    places.running.remove(victim)
    victim.set_status(SequenceStatus.WAITING)
    places.wait(victim)
    other = sequence("other", 9.0)
    places.wait(other)
    assert places.waiting == [victim, other]
