"""The sequences of a beam search: which one continues, which one is forked from which, and which one ends."""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.beams.group import BeamGroup, num_common
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from tests.decode_worker.rig import beams


def told(*candidates: tuple[int, float]) -> SampledToken:
    return SampledToken(candidates[0][0], top_logprobs=candidates)


def group(width: int, *, first: SampledToken | None = None) -> BeamGroup:
    root = Sequence(
        "r", 1, [10, 11, 12], 3, beams(width, stops=()), 0.0, block_tables=[[5]], status=SequenceStatus.RUNNING
    )
    return BeamGroup(root, 100, first)


def test_the_first_child_goes_on_in_its_parent_s_place_and_others_are_forked() -> None:
    made = group(3)
    root = made.leader
    assert not made.is_ready
    made.hear(root, told((1, -0.1), (2, -0.2), (3, -0.3)))
    assert made.is_ready
    turnover = made.advance()
    assert made.leader is root
    assert [(parent, child.beam, child.status) for parent, child in turnover.forked] == [
        (root, 1, SequenceStatus.WAITING),
        (root, 2, SequenceStatus.WAITING),
    ]
    assert turnover.ended == []
    assert [beam.token_ids[3:] for beam in made.beams] == [[1], [2], [3]]
    assert all(child.block_tables == [] for _, child in turnover.forked)
    assert not made.is_ready


def test_a_beam_without_children_ends_and_numbers_are_never_used_again() -> None:
    made = group(2)
    made.hear(made.leader, told((1, -0.1), (2, -0.2)))
    made.advance()
    first, second = made.beams
    made.hear(first, told((3, -9.0), (4, -9.0)))
    made.hear(second, told((5, -0.1), (6, -0.2)))
    turnover = made.advance()
    assert turnover.ended == [first]
    assert [(parent, child.beam) for parent, child in turnover.forked] == [(second, 2)]
    assert made.leader is second
    assert [beam.token_ids[3:] for beam in made.beams] == [[2, 5], [2, 6]]


def test_what_was_heard_before_a_preemption_is_heard_again() -> None:
    made = group(2, first=told((1, -0.1), (2, -0.2)))
    assert made.is_ready
    assert made.has_heard(made.leader)
    made.forget()
    assert not made.is_ready
    made.hear(made.leader, told((1, -0.1), (2, -0.2)))
    made.advance()
    assert made.num_steps == 0


def test_the_last_step_ends_all_of_them() -> None:
    made = group(2)
    while not made.is_over:
        for beam in made.beams:
            made.hear(beam, told((1, -0.1), (2, -0.2)))
        here = made.beams
        turnover = made.advance()
    assert turnover.ended == here
    assert [len(beam.tokens) for beam in made.result] == [12, 12]


@pytest.mark.parametrize(
    ("ours", "theirs", "count"), [([], [], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([5], [6], 0)]
)
def test_common_heads_are_counted(ours: list[int], theirs: list[int], count: int) -> None:
    assert num_common(ours, theirs) == count
