"""The sampling kernel against the sorting float64 reference, and the reference against hand-made rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.sampling.sample import kept_mask_reference, sample, sample_reference

Randn = Callable[..., torch.Tensor]
Sample = Callable[..., torch.Tensor]
LARGEST_BELOW_ONE = 1 - 2**-24
# The kernel sums in fp32 and the reference in float64. Within this distance of a boundary either result is right.
BOUNDARY = 1e-5


@pytest.fixture
def draw(device: str) -> Callable[..., torch.Tensor]:
    """Run an implementation on one row of logits, once for each uniform number."""

    def run(
        implementation: Sample,
        row: torch.Tensor,
        uniforms: list[float],
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> torch.Tensor:
        n = len(uniforms)
        return implementation(
            row.to(device).expand(n, -1),
            torch.full((n,), temperature, device=device),
            torch.full((n,), top_k, dtype=torch.int32, device=device),
            torch.full((n,), top_p, device=device),
            torch.full((n,), min_p, device=device),
            torch.tensor(uniforms, dtype=torch.float32, device=device),
        )

    return run


def _kept(
    row: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones(1, device=row.device)
    kept, weights = kept_mask_reference(row[None], one * temperature, (one * top_k).int(), one * top_p, one * min_p)
    return kept[0].nonzero()[:, 0], weights[0]


def test_reference_filters() -> None:
    row = torch.tensor([0.5, 0.1, 0.2, 0.1, 0.1]).log()
    assert _kept(row)[0].tolist() == [0, 1, 2, 3, 4]
    assert _kept(row, top_k=1)[0].tolist() == [0]
    # The third largest is one of three equal logits.
    assert _kept(row, top_k=3)[0].tolist() == [0, 1, 2, 3, 4]
    assert _kept(row, top_p=0.6)[0].tolist() == [0, 2]
    assert _kept(row, top_p=0.0)[0].tolist() == [0]
    assert _kept(row, top_p=0.75)[0].tolist() == [0, 1, 2, 3, 4]
    assert _kept(row, min_p=0.3)[0].tolist() == [0, 2]
    # top_p applies to the mass that top_k left: 0.5 / 0.7 > 0.7.
    assert _kept(row, top_k=2, top_p=0.7)[0].tolist() == [0]
    # min_p applies to tempered probabilities: at temperature 2, 0.2 / 0.5 becomes its square root.
    assert _kept(row, temperature=2.0, min_p=0.5)[0].tolist() == [0, 2]


@pytest.mark.parametrize("implementation", [sample, sample_reference])
def test_inverse_cdf_by_hand(draw: Sample, implementation: Sample) -> None:
    row = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.5, 0.0]).log()
    uniforms = [0.0, 0.2499, 0.2501, 0.4999, 0.5001, LARGEST_BELOW_ONE]
    assert draw(implementation, row, uniforms).tolist() == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("implementation", [sample, sample_reference])
def test_greedy_takes_the_lowest_of_equal_logits(draw: Sample, randn: Randn, implementation: Sample) -> None:
    """The equal logits lie in different vocabulary tiles, and the filters have no effect."""
    row = randn(9000)
    row[[8500, 100, 101]] = 9.0
    assert draw(implementation, row, [0.9], temperature=0.0, top_k=5, top_p=0.5).tolist() == [100]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7, "temperature": 1.7},
        {"top_k": 5000},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.93, "temperature": 0.8},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
)
@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize("vocab", [*(pytest.param(few, marks=pytest.mark.full) for few in (1, 500)), 37])
def test_every_kept_token_has_its_share(
    draw: Sample, randn: Randn, vocab: int, with_ties: bool, options: dict[str, float]
) -> None:
    """Both ends of a kept token's interval draw that token, so the kept set and its masses equal the reference's."""
    row = randn(vocab) * 3
    if with_ties:
        row = row.round()
    kept, weights = _kept(row, **options)
    if options.get("top_p", 1.0) < 1:
        _, all_weights = _kept(row, options.get("temperature", 1.0), options.get("top_k", 0))
        masses = all_weights.sort(descending=True)[0].cumsum(0) / all_weights.sum()
        assert (masses - options["top_p"]).abs().min() > BOUNDARY, "the case sits on the boundary of top_p"
    cumulative = weights.cumsum(0) / weights.sum()
    shares = weights[kept] / weights.sum()
    kept, shares = kept[shares > 4 * BOUNDARY], shares[shares > 4 * BOUNDARY]
    # Only the heaviest and lightest tokens, to keep the interpreter's work small.
    order = shares.argsort(descending=True)
    chosen = torch.cat((order[:4], order[-4:])).unique()
    upper = cumulative[kept[chosen]] - 2 * BOUNDARY
    lower = upper - shares[chosen] + 4 * BOUNDARY
    tokens = draw(sample, row, torch.cat((lower, upper)).tolist(), **options)
    assert tokens.tolist() == kept[chosen].tolist() * 2


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(one, marks=pytest.mark.full) for one in ({}, {"top_k": 9, "temperature": 0.7}, {"top_p": 0.9})),
        {"top_k": 20, "top_p": 0.85, "min_p": 0.01},
    ],
)
def test_many_draws_equal_the_reference(draw: Sample, randn: Randn, options: dict[str, float]) -> None:
    row = randn(60) * 2
    _, weights = _kept(row, **options)
    cumulative = (weights.cumsum(0) / weights.sum()).cpu()
    uniforms = torch.rand(24, generator=torch.Generator().manual_seed(5))
    clear = (cumulative - uniforms.double()[:, None]).abs().amin(1) > BOUNDARY
    chosen = uniforms[clear].tolist()
    assert len(chosen) > 20
    assert torch.equal(draw(sample, row, chosen, **options), draw(sample_reference, row, chosen, **options))


def test_a_batch_of_different_rows_over_several_tiles(device: str, randn: Randn) -> None:
    logits = (randn(5, 9100) * 2)[:, :9001]
    arguments = (
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.5], device=device),
        torch.tensor([0, 0, 50, 0, 9001], device=device),
        torch.tensor([1.0, 0.9, 0.95, 1.0, 0.4], device=device),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.01], device=device),
    )
    uniforms = torch.tensor([0.5, 0.123, 0.7, 0.99, 0.31], device=device)
    before = logits.clone()
    tokens = sample(logits, *arguments, uniforms)
    assert tokens.dtype == torch.int64
    assert torch.equal(logits, before)
    _, weights = kept_mask_reference(logits, *arguments)
    cumulative = weights.cumsum(1) / weights.sum(1, keepdim=True)
    assert tokens[0] == logits[0].argmax()
    for row in range(1, 5):
        token = tokens[row].item()
        assert weights[row, token] > 0
        upper, lower = cumulative[row, token], cumulative[row, token] - weights[row, token] / weights[row].sum()
        assert lower - BOUNDARY <= uniforms[row].double() <= upper + BOUNDARY


def _flat(randn: Randn, vocab: int) -> torch.Tensor:
    return randn(vocab) * 0.1


def _peaked(randn: Randn, vocab: int) -> torch.Tensor:
    return randn(vocab) * 4


def _crowded(randn: Randn, vocab: int) -> torch.Tensor:
    """All likely tokens are in two of the kernel's groups, with ties."""
    row = randn(vocab) - 9.0
    row[4000:4060] = (randn(60) * 2).round()
    return row


def _tied(randn: Randn, vocab: int) -> torch.Tensor:
    """Hundreds of tokens, each in its own group, share the largest logit."""
    row = randn(vocab).clamp(max=1.0)
    row[::13] = 2.0
    return row


def _masked(randn: Randn, vocab: int) -> torch.Tensor:
    """A row in which a grammar allows only four tokens."""
    row = torch.full((vocab,), -math.inf, device=randn(1).device)
    row[[5, 77, 4321, vocab - 1]] = randn(4)
    return row


@pytest.mark.parametrize(
    "make", [*(pytest.param(one, marks=pytest.mark.full) for one in (_flat, _peaked, _crowded, _tied)), _masked]
)
def test_long_rows_of_every_shape(device: str, randn: Randn, make: Callable[[Randn, int], torch.Tensor]) -> None:
    """The kept tokens are in few groups, in more groups than the first look takes, or in all groups."""
    temperature, top_k, top_p, min_p = zip(
        (1.0, 0, 1.0, 0.0),
        (0.8, 3, 1.0, 0.0),
        (1.0, 200, 0.9, 0.02),
        (1.2, 0, 0.5, 0.0),
        (1.0, 0, 0.98, 0.001),
        (2.0, 0, 1.0, 0.3),
        (0.05, 50, 0.9, 0.0),
        strict=True,
    )
    arguments = (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
    )
    logits = torch.stack([make(randn, 9001)] * len(top_k))
    _, weights = kept_mask_reference(logits, *arguments)
    cumulative = weights.cumsum(1) / weights.sum(1, keepdim=True)
    rows = torch.arange(len(top_k), device=device)
    for uniform in (0.0, 0.37, LARGEST_BELOW_ONE):
        tokens = sample(logits, *arguments, torch.full((len(top_k),), uniform, device=device))
        share = weights[rows, tokens] / weights.sum(1)
        assert (share > 0).all(), (make, uniform, tokens)
        upper = cumulative[rows, tokens]
        assert (upper - share - BOUNDARY <= uniform).all(), (make, uniform, tokens)
        assert (upper + BOUNDARY >= uniform).all(), (make, uniform, tokens)


def test_a_vocabulary_of_larger_groups(device: str, randn: Randn) -> None:
    """More than 4096 groups of 32, so the kernel uses groups of 64."""
    logits = (randn(1, 131073) * 3).expand(3, -1)
    arguments = (
        torch.tensor([0.0, 1.0, 1.0], device=device),
        torch.tensor([0, 20, 0], device=device),
        torch.tensor([1.0, 0.9, 1.0], device=device),
        torch.zeros(3, device=device),
    )
    uniforms = torch.tensor([0.5, 0.4, 0.7], device=device)
    expected = sample_reference(logits, *arguments, uniforms)
    tokens = sample(logits, *arguments, uniforms)
    assert tokens[:2].tolist() == expected[:2].tolist()
    weights = kept_mask_reference(logits, *arguments)[1][2]
    assert abs(weights[: tokens[2]].sum() / weights.sum() - 0.7) < weights[tokens[2]] / weights.sum() + BOUNDARY


# These rows overflow to infinity, of which the interpreter's numpy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("implementation", [sample, sample_reference])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_BELOW_ONE])
def test_extreme_rows_give_an_allowed_token(draw: Sample, implementation: Sample, uniform: float) -> None:
    inf, nan = math.inf, math.nan
    cases: list[tuple[list[float], dict[str, float], set[int]]] = [
        ([-inf, 1.0, -inf, nan], {"top_k": 3}, {1}),
        ([-inf, 1.0, -inf, nan], {"top_p": 0.9}, {1}),
        ([nan, 1.0, 2.0], {"temperature": 0.0}, {2}),
        ([0.0, inf, -inf, inf], {"top_p": 0.9}, {1, 3}),
        ([3.0, 3.0, 3.0], {"top_k": 1}, {0, 1, 2}),
        ([-0.0, 0.0, -1.0], {"top_k": 1}, {int(uniform >= 0.5)}),
        ([3.0, 3.0, 1.0], {"min_p": 1.0}, {int(uniform >= 0.5)}),
        ([1.0, 2.0, 1.5], {"temperature": 1e-42}, {1}),
        ([1e30, -1e30, 1e30], {"temperature": 1e-20}, {0, 2}),
        ([-3e38, 3e38], {"top_p": 0.5}, {1}),
        ([-inf, -inf], {}, {0, 1}),
    ]
    for row, options, allowed in cases:
        token = draw(implementation, torch.tensor(row), [uniform], **options).item()
        assert token in allowed, (row, options)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.99999, LARGEST_BELOW_ONE])
def test_a_flat_long_row_stays_within_the_filter(draw: Sample, uniform: float) -> None:
    """Rounding of a long fp32 sum must not move the draw past the last kept token."""
    row = torch.zeros(20000)
    row[15000:] = -math.inf
    token = draw(sample, row, [uniform]).item()
    assert abs(token - uniform * 15000) <= 15000 * BOUNDARY + 1
    assert token < 15000


def test_the_end_of_a_long_row_survives_rounding(draw: Sample, randn: Randn) -> None:
    """The largest uniform number draws a token at the end of the row, although the fp32 cumulative sum may stay below
    it."""
    for _ in range(4):
        row = randn(9000) * 2
        _, weights = _kept(row)
        token = draw(sample, row, [LARGEST_BELOW_ONE]).item()
        assert weights[token:].sum() / weights.sum() <= BOUNDARY + weights[token] / weights.sum()


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    logits, row = randn(2, 9), torch.ones(2, device=device)
    k = row.int()
    with pytest.raises(ValueError, match="logits has dtype"):
        sample(logits.half(), row, k, row, row, row)
    with pytest.raises(ValueError, match="top_k has dtype"):
        sample(logits, row, row, row, row, row)
    with pytest.raises(ValueError, match=r"uniforms has shape \(1,\), expected \[2\]"):
        sample(logits, row, k, row, row, row[:1])
