"""Bias, allowed tokens, bad words, min_tokens and guides, against Hugging Face's processors and combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvrelay.engine.step.rules import Asked, has_rules, make_rules
from kvrelay.engine.step.sequence import Sequence
from tests.engine.conftest import sequence
from tests.engine.sampling.rig import processed, run

VOCAB = 90


class Allows:
    """A guide that always allows the same tokens. Implements GuideState."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids
        self.num_filled = 0

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        self.num_filled += 1
        for token_id in self._token_ids:
            bitmask[token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)

    def accept(self, token_id: int) -> None:
        if token_id not in self._token_ids:
            raise ValueError(f"{token_id} may not come")

    @property
    def is_complete(self) -> bool:
        return False


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 2


def guided(guide: Allows, token_ids: list[int], **sampling: Any) -> Sequence:
    made = sequence(token_ids, [], **sampling)
    made.guide = guide
    return made


def test_logit_bias_is_hugging_faces() -> None:
    logits = random_logits(1)
    bias = ((3, 2.5), (89, -100.0), (0, 0.25), (40, 1e6))
    of = sequence([1, 2], [], logit_bias=bias)
    theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in bias})
    torch.testing.assert_close(processed(logits, [of]), theirs(torch.tensor([of.token_ids]), logits.clone()))
    twice = sequence([1], [], logit_bias=((3, 1.0), (3, 0.5)))
    torch.testing.assert_close(processed(logits, [twice])[0, 3], logits[0, 3] + 1.5)


def test_allowed_tokens_are_hugging_faces_prefix_constraint() -> None:
    logits = random_logits(1)
    allowed = (5, 88, 17)
    theirs = PrefixConstrainedLogitsProcessor(lambda batch, ids: list(allowed), 1)
    of = sequence([1, 2], [], allowed_token_ids=allowed)
    torch.testing.assert_close(processed(logits, [of]), theirs(torch.tensor([[1, 2]]), logits.clone()))


WORDS = ((7,), (1, 2), (3, 1, 4), (3, 1, 5), (1, 6), (9, 9, 9), (2, 3, 1, 8), (11, 12))


@pytest.mark.parametrize("context", [[1], [3, 1], [2, 3, 1], [3, 1, 1], [9, 9], [1, 9], [4, 4, 4, 4], [12, 11]])
def test_bad_words_are_hugging_faces(context: list[int]) -> None:
    logits = random_logits(1)
    theirs = NoBadWordsLogitsProcessor([list(word) for word in WORDS], eos_token_id=2)
    # A token before the context, because theirs ignores a word as long as the whole context.
    token_ids = [50, *context]
    for num_prompt_tokens in range(1, len(token_ids) + 1):  # prompt and output count alike
        of = sequence(token_ids, [], bad_words=WORDS)
        of.num_prompt_tokens = num_prompt_tokens
        torch.testing.assert_close(processed(logits, [of]), theirs(torch.tensor([token_ids]), logits.clone()))


def test_a_bad_word_longer_than_the_context_waits() -> None:
    logits = random_logits(1)
    assert torch.equal(processed(logits, [sequence([3], [], bad_words=((1, 2, 3, 4),))]), logits)


@pytest.mark.parametrize("num_output_tokens", [0, 2, 3, 4])
def test_min_tokens_is_hugging_faces(num_output_tokens: int) -> None:
    logits = random_logits(1)
    token_ids = [1] * (5 + num_output_tokens)
    # Stop tokens outside the vocabulary forbid nothing, not even the last token.
    of = sequence(token_ids, [], min_tokens=3, stop_token_ids=(2, 60, 5000, -1))
    of.num_prompt_tokens = 5
    theirs = MinNewTokensLengthLogitsProcessor(5, 3, [2, 60])
    torch.testing.assert_close(processed(logits, [of]), theirs(torch.tensor([token_ids]), logits.clone()))
    assert has_rules(of) == (num_output_tokens < 3)
    # A token in flight counts as an output token.
    behind = sequence(token_ids[:-1], [], min_tokens=3, stop_token_ids=(2, 60))
    behind.num_prompt_tokens = 5
    assert has_rules(behind, num_ahead=1) == (num_output_tokens < 3)
    rules = make_rules([Asked(behind, 1)], VOCAB)
    assert (rules is not None and rules.forbidden_tokens) == ([2, 60] if num_output_tokens < 3 else False)


def test_a_bad_word_that_depends_on_a_token_under_way_is_refused() -> None:
    rules = make_rules([Asked(sequence([1], [], bad_words=((7,),)), 1)], VOCAB)
    assert rules is not None
    assert rules.forbidden_tokens == [7]
    with pytest.raises(AssertionError, match="behind 1 tokens that nobody knows"):
        make_rules([Asked(sequence([1], [], bad_words=((7,), (1, 2))), 1)], VOCAB)


def test_a_guide_forbids_what_it_does_not_allow() -> None:
    logits = random_logits(3)
    rows = [sequence([1], []), guided(Allows(4, 31, 32, 89), [1]), guided(Allows(0, 63, 64), [1], temperature=1.0)]
    given = processed(logits, rows)
    assert torch.equal(given[0], logits[0])
    assert torch.isfinite(given[1]).nonzero()[:, 0].tolist() == [4, 31, 32, 89]
    assert torch.isfinite(given[2]).nonzero()[:, 0].tolist() == [0, 63, 64]
    sampled = [token.token_id for token in run(logits, rows)]
    assert sampled[0] == int(logits[0].argmax())
    assert sampled[1] == max((4, 31, 32, 89), key=lambda token: float(logits[1, token]))
    assert sampled[2] in (0, 63, 64)


def test_a_guide_is_asked_once_a_step() -> None:
    guide = Allows(1, 2)
    run(random_logits(1), [guided(guide, [1], processors=("half",))], {"half": lambda logits, _: logits.mul_(0.5)})
    assert guide.num_filled == 1


def test_where_a_guide_leaves_only_what_else_is_forbidden_it_alone_counts() -> None:
    logits = random_logits(4)
    rows = [
        guided(Allows(2), [1], min_tokens=5, stop_token_ids=(2,)),
        guided(Allows(2, 3), [1], min_tokens=5, stop_token_ids=(2,)),
        guided(Allows(4, 5), [1], allowed_token_ids=(6, 7)),
        guided(Allows(8, 9), [1], bad_words=((8,),), allowed_token_ids=(8, 9)),
    ]
    left = [row.isfinite().nonzero()[:, 0].tolist() for row in processed(logits, rows)]
    assert left == [[2], [3], [4, 5], [9]]


def test_contradictions_still_give_a_token() -> None:
    logits = random_logits(2)
    rows = [
        sequence([1], [], temperature=t, allowed_token_ids=(5,), bad_words=((5,),), min_tokens=1, stop_token_ids=(5,))
        for t in (0.0, 1.0)
    ]
    assert all(0 <= token.token_id < VOCAB for token in run(logits, rows))
