"""The sampler against slow references in float64, Hugging Face's processors, and itself alone."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.noise import uniforms
from kvrelay.engine.sampler import draw_tokens, penalize, sample
from kvrelay.engine.sequence import Sequence
from tests.engine.conftest import sequence, tokens


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def run(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    return sample(logits.clone(), sequences, argmax, penalize, draw_tokens)


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Token -> probability after the filters, by the book: sort, walk, count ties in."""
    scaled = [value / params.temperature for value in logits.double().tolist()]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        limit = scaled[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if scaled[token] >= limit]

    def probabilities(of: list[int]) -> dict[int, float]:
        weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in of}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    if params.top_p < 1:
        mass, limit = 0.0, scaled[order[0]]
        for token, probability in probabilities(order).items():
            if mass >= params.top_p:
                break
            mass, limit = mass + probability, scaled[token]
        order = [token for token in order if scaled[token] >= limit]
    left = probabilities(order)
    highest = max(left.values())
    return probabilities([token for token in order if left[token] >= params.min_p * highest])


def drawn(logits: torch.Tensor, params: SamplingParams, draw: float) -> tuple[int, float]:
    """The token the inverse CDF gives, and how far the draw is from the boundary."""
    total, distance = 0.0, 1.0
    chosen = None
    for token, probability in sorted(kept_tokens(logits, params).items()):
        total += probability
        distance = min(distance, abs(total - draw))
        if chosen is None and total > draw:
            chosen = token
    assert chosen is not None
    return chosen, distance


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("vocab", [97, 128, 3001])
def test_draws_are_the_inverse_cdf_of_what_the_filters_leave(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Halves make many ties; the flat rows need more candidates than the first look takes.
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
        draw = uniforms(np.array([of.sampling.seed], np.uint64), np.array([of.num_tokens], np.uint64))[0]
        expected, distance = drawn(logits[row], of.sampling, float(draw))
        assert result.token_id == expected or distance < 1e-5, (row, of.sampling)


def test_the_first_candidates_and_the_whole_vocabulary_agree() -> None:
    # 0.02 of standard deviation: top_p = 0.9 keeps 2,600 of 3,001 tokens, more than the candidates.
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
        theirs = logits.clone()
        if params.top_k:
            theirs = TopKLogitsWarper(params.top_k)(None, theirs)
        if params.top_p < 1:
            theirs = TopPLogitsWarper(params.top_p)(None, theirs)
        if params.min_p:
            theirs = MinPLogitsWarper(params.min_p)(None, theirs)
        assert set(kept_tokens(logits[0], params)) == set(torch.isfinite(theirs[0]).nonzero()[:, 0].tolist())


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    sequences = [sequence([0], [], temperature=1.0, seed=seed) for seed in range(4000)]
    counts = np.bincount([token.token_id for token in run(logits, sequences)], minlength=4)
    np.testing.assert_allclose(counts / 4000, torch.softmax(logits[0], -1).numpy(), atol=0.03)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    sequences = [
        sequence(tokens(row, row + 1), [], temperature=(row % 4) / 2, seed=row - 3, **filters)
        for row, filters in zip(range(40), itertools.cycle(FILTERS), strict=False)
    ]
    together = run(logits, sequences)
    assert run(logits.flip(0), sequences[::-1]) == together[::-1]
    assert [run(logits[row : row + 1], [of])[0] for row, of in enumerate(sequences)] == together


def test_the_token_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 50_000)
    seen = {
        run(logits, [sequence([0] * length, [], temperature=1.0, seed=seed)])[0].token_id
        for length in (1, 2, 3)
        for seed in (0, 1, 2**32, 2**63 + 1, 2**64 - 1)
    }
    assert len(seen) == 15


def test_rows_of_minus_infinity_and_extreme_draws_take_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [3, 130, 131]] = 0.0
    for draw, expected in ((0.0, 3), (0.34, 130), (1 - 2**-53, 131)):
        monkeypatch.setattr("kvrelay.engine.sampler.uniforms", lambda seeds, positions, draw=draw: np.array([draw]))
        assert run(logits, [sequence([0], [], temperature=1.0)])[0].token_id == expected


def test_greedy_takes_the_likeliest_and_needs_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.sampler.uniforms", None)
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(3))
    results = run(logits, [sequence([0], []) for _ in range(5)])
    assert [token.token_id for token in results] == logits.argmax(-1).tolist()
    assert results[0].logprob is None


def test_repetition_penalty_is_hugging_faces_over_prompt_and_output() -> None:
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(4))
    sequences = [sequence(tokens(row, 9), [], repetition_penalty=factor) for row, factor in enumerate((1.0, 1.7, 0.6))]
    for of in sequences:
        of.token_ids[:] = [token % 60 for token in of.token_ids]
        of.num_prompt_tokens = 4
    penalized = _penalized(logits, sequences)
    for row, of in enumerate(sequences):
        processor = RepetitionPenaltyLogitsProcessor(of.sampling.repetition_penalty)
        expected = processor(torch.tensor([of.token_ids]), logits[row : row + 1].clone())
        torch.testing.assert_close(penalized[row : row + 1], expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(2, 10)
    plain = sequence([1, 2, 3], [])
    of = sequence([1, 1, 5, 5, 5, 7], [], presence_penalty=0.5, frequency_penalty=0.25)
    of.num_prompt_tokens = 2
    penalized = _penalized(logits, [plain, of])
    expected = torch.zeros(2, 10)
    expected[1, 5], expected[1, 7] = -0.5 - 3 * 0.25, -0.5 - 0.25
    torch.testing.assert_close(penalized, expected)


def test_penalties_act_before_the_choice_and_leave_logprobs_raw() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    of = sequence([0, 1], [], presence_penalty=2.0, num_logprobs=2)
    of.num_prompt_tokens = 1
    (result,) = run(logits, [of])
    raw = torch.log_softmax(logits[0], dim=-1)
    assert result.token_id == 2
    assert result.logprob == pytest.approx(raw[2].item())
    assert [token for token, _ in result.top_logprobs] == [1, 2]


def test_logprobs_only_for_rows_that_ask_and_as_many_as_they_ask_for() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(6))
    asked = [None, 0, 3, 99]
    results = run(logits, [sequence([0], [], num_logprobs=count, temperature=2.0) for count in asked])
    raw = torch.log_softmax(logits, dim=-1)
    assert results[0].logprob is None
    assert [len(result.top_logprobs) for result in results] == [0, 0, 3, 30]
    for row in (1, 2, 3):
        assert results[row].logprob == pytest.approx(raw[row, results[row].token_id].item(), abs=1e-6)
    assert [value for _, value in results[2].top_logprobs] == pytest.approx(raw[2].topk(3).values.tolist())


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 1e-45, 1e-60])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(len(FILTERS), 300, generator=torch.Generator().manual_seed(8)) * 30
    results = run(logits, [sequence([0], [], temperature=temperature, seed=7, **filters) for filters in FILTERS])
    assert [token.token_id for token in results] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [1e-60, 1e-45, 1e-30])
def test_a_tiny_repetition_penalty_repeats(penalty: float) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(9)).abs() + 1
    sequences = [sequence([5], [], temperature=t, repetition_penalty=penalty) for t in (0.0, 1.0)]
    assert [token.token_id for token in run(logits, sequences)] == [5, 5]


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


def test_top_k_keeps_all_of_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    sampling = {"temperature": 1.0, "top_k": 2}
    seen = {run(logits, [sequence([0], [], seed=seed, **sampling)])[0].token_id for seed in range(200)}
    assert seen == {1, 2, 3, 5}


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.6, "top_p": 0.8, "min_p": 0.05}],
)
def test_draws_pass_a_chi_square_test(filters: dict[str, float]) -> None:
    num_draws = 8000
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(11))
    kept = kept_tokens(logits[0], sequence([0], [], **filters).sampling)
    sequences = [sequence([0] * (1 + place % 50), [], seed=place // 50, **filters) for place in range(num_draws)]
    counts = np.bincount(
        [token.token_id for token in run(logits.repeat(num_draws, 1), sequences)], minlength=logits.shape[1]
    )
    assert counts.sum() == sum(counts[token] for token in kept)
    statistic = sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in kept.items())
    # Mean k - 1, variance 2 (k - 1): five deviations. The seeds are fixed, so this never flakes.
    freedom = len(kept) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), statistic


def _penalized(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """The logits as the draw sees them."""
    seen: list[torch.Tensor] = []

    def keep(values: torch.Tensor, rows: object) -> torch.Tensor:
        seen.append(values)
        return values.argmax(dim=-1)

    sample(logits.clone(), sequences, argmax, penalize, keep)
    return seen[0]
