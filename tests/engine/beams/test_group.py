"""A beam search that loses its blocks. Which beams go on: ``tests/decode_worker/test_beam_scheduling.py``."""

from __future__ import annotations

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.beams.group import BeamGroup
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from tests.decode_worker.rig import beams


def told(*candidates: tuple[int, float]) -> SampledToken:
    return SampledToken(candidates[0][0], top_logprobs=candidates)


def group(width: int, *, first: SampledToken | None = None) -> BeamGroup:
    root = Sequence(
        "r", 1, [10, 11, 12], 3, beams(width, stops=()), 0.0, block_tables=[[5]], status=SequenceStatus.RUNNING
    )
    return BeamGroup(root, 100, first)


def test_what_was_heard_before_a_preemption_is_heard_again() -> None:
    made = group(2, first=told((1, -0.1), (2, -0.2)))
    assert made.is_ready
    assert made.has_heard(made.leader)
    made.forget()
    assert not made.is_ready
    made.hear(made.leader, told((1, -0.1), (2, -0.2)))
    made.advance()
    assert made.num_steps == 0
