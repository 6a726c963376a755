"""Penalties against Hugging Face's processor and by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvrelay.engine.sampling.sampled import UnderWay
from kvrelay.engine.sampling.sampler import process_logits
from tests.engine.conftest import sequence, tokens
from tests.engine.sampling.rig import PlainOps, asked, processed, run


def test_repetition_penalty_is_hugging_faces_over_prompt_and_output() -> None:
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(4))
    sequences = [sequence(tokens(row, 9), [], repetition_penalty=factor) for row, factor in enumerate((1.0, 1.7, 0.6))]
    for of in sequences:
        of.token_ids[:] = [token % 60 for token in of.token_ids]
        of.num_prompt_tokens = 4
    penalized = processed(logits, sequences)
    for row, of in enumerate(sequences):
        processor = RepetitionPenaltyLogitsProcessor(of.sampling.repetition_penalty)
        expected = processor(torch.tensor([of.token_ids]), logits[row : row + 1].clone())
        torch.testing.assert_close(penalized[row : row + 1], expected)


@pytest.mark.parametrize("penalty", [1e-60, 1e-45, 1e-30])
def test_a_tiny_repetition_penalty_repeats(penalty: float) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(9)).abs() + 1
    sequences = [sequence([5], [], temperature=t, repetition_penalty=penalty) for t in (0.0, 1.0)]
    assert [token.token_id for token in run(logits, sequences)] == [5, 5]


@pytest.mark.parametrize("seed", range(10))
def test_a_token_under_way_counts_as_if_it_were_known(seed: int) -> None:
    draws = random.Random(seed)
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(seed)) * 2
    ahead, known, last = [], [], []
    for row in range(7):
        params = {
            "repetition_penalty": draws.choice((1.0, 1.5, 0.7)),
            "presence_penalty": draws.choice((0.0, 0.5)),
            "frequency_penalty": draws.choice((0.0, 0.3)),
        }
        token_ids = [draws.randrange(20) for _ in range(draws.randint(1, 9))]
        num_prompt_tokens = draws.randint(1, len(token_ids))
        last.append(draws.randrange(20))
        for made, tokens_of in ((ahead, token_ids), (known, token_ids + last[-1:] * (row > 0))):
            made.append(sequence(tokens_of, [], **params))
            made[-1].num_prompt_tokens = num_prompt_tokens
    # The first row has no token in flight, and its number is ignored.
    under_way = UnderWay(np.array([0] + [1] * 6, dtype=np.int32), torch.tensor(last))
    given = logits.clone()
    process_logits(given, asked(ahead, 20)[0], None, PlainOps(), {}, under_way)
    assert torch.equal(given, processed(logits, known))
    # A row without any entry yet.
    fresh = sequence([5], [], presence_penalty=1.0)
    given = torch.zeros(1, 20)
    one = UnderWay(np.ones(1, dtype=np.int32), torch.tensor([3]))
    process_logits(given, asked([fresh], 20)[0], None, PlainOps(), {}, one)
    assert given.nonzero().tolist() == [[0, 3]]


def test_greedy_rows_take_the_likeliest_after_their_penalties() -> None:
    """The penalties alone and combined, against a float64 computation of each row."""
    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(13)) * 2
    settings = [
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    ]
    sequences = [sequence([t % 40 for t in tokens(row, 30)], [], **settings[row % 5]) for row in range(60)]
    for of in sequences:
        of.num_prompt_tokens = 12
    changed = 0
    for row, (result, of) in enumerate(zip(run(logits, sequences), sequences, strict=True)):
        values, params = logits[row].double().tolist(), of.sampling
        prompt, output = of.token_ids[:12], of.token_ids[12:]
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
            values[token] -= params.presence_penalty * (token in output)
            values[token] -= params.frequency_penalty * output.count(token)
        assert result.token_id == max(range(40), key=values.__getitem__)
        changed += result.token_id != int(logits[row].argmax())
    assert changed > 15
