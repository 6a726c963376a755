"""Filters and draws against slow float64 references and Hugging Face's warpers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.sampling.draw import draw_tokens
from kvrelay.engine.sampling.filters import filter_typical_rows
from kvrelay.engine.sampling.noise import uniforms
from kvrelay.engine.sampling.rows import SamplingRows
from tests.engine.conftest import sequence, tokens
from tests.engine.sampling.rig import FILTERS, asked, kept_tokens, run


def copied(arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


def drawn(logits: torch.Tensor, params: SamplingParams, draw: float) -> tuple[int, float]:
    """The token by the inverse CDF, and the distance of the draw from the nearest boundary."""
    total, distance = 0.0, 1.0
    chosen = None
    for token, probability in sorted(kept_tokens(logits, params).items()):
        total += probability
        distance = min(distance, abs(total - draw))
        if chosen is None and total > draw:
            chosen = token
    assert chosen is not None
    return chosen, distance


@pytest.mark.parametrize("vocab", [97, 128, pytest.param(3001, marks=pytest.mark.full)])
def test_draws_are_the_inverse_cdf_of_what_the_filters_leave(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Halves make many ties. The flat rows keep more candidates than the first look takes.
    logits = (
        torch.randn(4 * len(FILTERS), vocab, generator=generator)
        * torch.tensor([3.0, 0.1])[torch.arange(4 * len(FILTERS)) % 2, None]
    )
    logits[::4] = (logits[::4] * 2).round() / 2
    sequences = [
        sequence(tokens(row, 1 + row), [], seed=row * 7919, temperature=0.5 + row % 3, **filters)
        for row, filters in enumerate(FILTERS * 4)
    ]
    results = run(logits, sequences)
    for row, (result, of) in enumerate(zip(results, sequences, strict=True)):
        seed, choice, position = (np.array([x], np.uint64) for x in (of.sampling.seed, 0, of.num_tokens))
        draw = uniforms(seed, choice, position)[0]
        expected, distance = drawn(logits[row], of.sampling, float(draw))
        assert result.token_id == expected or distance < 1e-5, (row, of.sampling)


def test_the_first_candidates_and_the_whole_vocabulary_agree() -> None:
    # With a standard deviation of 0.02, top_p = 0.9 keeps 2,600 of 3,001 tokens, more than the candidates.
    logits = torch.randn(1, 3001, generator=torch.Generator().manual_seed(1)) * 0.02
    of = sequence([1], [], temperature=1.0, top_p=0.9)
    kept = kept_tokens(logits[0], of.sampling)
    assert len(kept) > 2000
    seen = set()
    for seed in range(300):
        of = sequence([1], [], temperature=1.0, top_p=0.9, seed=seed)
        seen.add(run(logits, [of])[0].token_id)
    assert seen <= set(kept)
    assert len(seen) > 200


def test_filters_keep_what_hugging_faces_keep() -> None:
    logits = torch.randn(1, 211, generator=torch.Generator().manual_seed(5)) * 2
    for filters in FILTERS:
        params = SamplingParams(max_tokens=1, temperature=1.0, **filters)
        if params.typical_p == 0:
            continue  # Hugging Face's warper refuses 0
        theirs = logits.clone()
        if params.top_k:
            theirs = TopKLogitsWarper(params.top_k)(None, theirs)
        if params.top_p < 1:
            theirs = TopPLogitsWarper(params.top_p)(None, theirs)
        if params.min_p:
            theirs = MinPLogitsWarper(params.min_p)(None, theirs)
        if params.typical_p < 1:
            theirs = TypicalLogitsWarper(params.typical_p)(None, theirs)
        assert set(kept_tokens(logits[0], params)) == set(torch.isfinite(theirs[0]).nonzero()[:, 0].tolist())


def test_rows_of_minus_infinity_and_extreme_draws_take_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [3, 130, 131]] = 0.0
    for draw, expected in ((0.0, 3), (0.34, 130), (1 - 2**-53, 131)):
        monkeypatch.setattr("kvrelay.engine.sampling.rows.uniforms", lambda *key, draw=draw: np.array([draw]))
        assert run(logits, [sequence([0], [], temperature=1.0)])[0].token_id == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 1e-45, 1e-60])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(len(FILTERS), 300, generator=torch.Generator().manual_seed(8)) * 30
    results = run(logits, [sequence([0], [], temperature=temperature, seed=7, **filters) for filters in FILTERS])
    assert [token.token_id for token in results] == logits.argmax(-1).tolist()


def test_a_row_of_nan_does_not_disturb_the_others() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(10))
    broken = logits.clone()
    broken[2] = torch.nan
    for filters in FILTERS:
        sequences = [sequence([0], [], temperature=1.0, seed=seed, **filters) for seed in range(4)]
        results = run(broken, sequences)
        assert 0 <= results[2].token_id < 300
        expected = run(logits, sequences)
        assert [results[row] for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]


@pytest.mark.parametrize("vocab", [300, 3001])
def test_typical_rows_filtered_beforehand_draw_the_same(vocab: int) -> None:
    logits = torch.randn(4 * len(FILTERS), vocab, generator=torch.Generator().manual_seed(12)) * 2
    sequences = [
        sequence(tokens(row, 1 + row), [], seed=row, temperature=(row % 4) / 2, **filters)
        for row, filters in enumerate(FILTERS * 4)
    ]
    rows = SamplingRows.of(asked(sequences, vocab)[0])
    filtered = logits.clone()
    left = filter_typical_rows(filtered, rows, copied)
    assert (left.typical_p[left.temperature > 0] == 1).all()
    assert draw_tokens(filtered, left).tolist() == draw_tokens(logits.clone(), rows).tolist()
    plain = [row for row, of in enumerate(sequences) if of.sampling.typical_p == 1 or of.sampling.temperature == 0]
    assert torch.equal(filtered[plain], logits[plain])
    assert filter_typical_rows(filtered, left, copied) is left
