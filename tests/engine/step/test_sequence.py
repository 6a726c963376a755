"""A sequence's states, its counts, and its end."""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.step.sequence import SequenceStatus
from tests.engine.conftest import sequence

WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED


def test_nothing_follows_the_end() -> None:
    of = sequence([1], [])
    of.set_status(RUNNING)
    of.set_status(FINISHED)
    for status in SequenceStatus:
        with pytest.raises(ValueError, match=rf"\('r', 1\): no transition FINISHED -> {status.name}"):
            of.set_status(status)


def test_max_tokens_counts_earlier_attempts() -> None:
    of = sequence([1, 2, 3, 4], [], max_tokens=3)
    of.num_prompt_tokens = 2
    assert of.append(SampledToken(9), 100) is FinishReason.LENGTH
    assert of.finish_reason is FinishReason.LENGTH
    assert of.status is WAITING  # the scheduler changes it


def test_the_models_length_ends_it() -> None:
    of = sequence([1, 2], [])
    assert of.append(SampledToken(9), 4) is None
    assert of.append(SampledToken(9), 4) is FinishReason.LENGTH


def test_a_stop_token_is_kept_and_wins_over_the_length() -> None:
    of = sequence([1, 2], [], max_tokens=1, stop_token_ids=(7, 9))
    assert of.append(SampledToken(9), 3) is FinishReason.STOP
    assert of.token_ids == [1, 2, 9]
