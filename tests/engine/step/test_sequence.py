"""A sequence's states, its counts, and when it ends."""

from __future__ import annotations

import itertools

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.step.sequence import SequenceStatus
from tests.engine.conftest import sequence

WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED
LEGAL = {(WAITING, RUNNING), (WAITING, FINISHED), (RUNNING, WAITING), (RUNNING, FINISHED)}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SequenceStatus, repeat=2)))
def test_transitions_are_those_of_the_table(before: SequenceStatus, after: SequenceStatus) -> None:
    of = sequence([1], [])
    of.status = before
    if (before, after) in LEGAL:
        of.set_status(after)
        assert of.status is after
        return
    with pytest.raises(ValueError, match=rf"\('r', 1\): no transition {before.name} -> {after.name}"):
        of.set_status(after)
    assert of.status is before


def test_counts_follow_the_tokens() -> None:
    of = sequence([1, 2, 3, 4, 5], [])
    of.num_prompt_tokens = 3  # two tokens of an earlier attempt
    of.num_computed_tokens = 4
    assert (of.key, of.num_tokens, of.num_output_tokens, of.num_uncomputed_tokens) == (("r", 1), 5, 2, 1)
    assert of.append(SampledToken(9), 100) is None
    assert (of.num_tokens, of.num_output_tokens, of.num_uncomputed_tokens) == (6, 3, 2)


def test_max_tokens_counts_earlier_attempts() -> None:
    of = sequence([1, 2, 3, 4], [], max_tokens=3)
    of.num_prompt_tokens = 2
    assert of.append(SampledToken(9), 100) is FinishReason.LENGTH
    assert of.finish_reason is FinishReason.LENGTH
    assert of.status is WAITING  # the scheduler's to change


def test_the_models_length_ends_it() -> None:
    of = sequence([1, 2], [])
    assert of.append(SampledToken(9), 4) is None
    assert of.append(SampledToken(9), 4) is FinishReason.LENGTH


def test_a_stop_token_is_kept_and_wins_over_the_length() -> None:
    of = sequence([1, 2], [], max_tokens=1, stop_token_ids=(7, 9))
    assert of.append(SampledToken(9), 3) is FinishReason.STOP
    assert of.token_ids == [1, 2, 9]


def test_sequences_are_compared_by_identity() -> None:
    assert sequence([1], []) != sequence([1], [])
