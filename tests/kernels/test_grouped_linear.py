"""Products with experts' weights against float64: tails, experts without rows, one expert with all, every tile and every format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.grouped_linear import grouped_linear, grouped_linear_reference, plan_routes

from .conftest import DTYPES, TOLERANCES

Randn = Callable[..., torch.Tensor]


def choices(device: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Different experts for each token; the last expert is nobody's if there is a choice."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if top_k < num_experts:
        scores[:, -1] = -1
    return scores.topk(top_k).indices.to(device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to the row: its sums are of many numbers, each as large as the result."""
    errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert actual.shape == expected.shape
    assert float(errors.nan_to_num(nan=torch.inf).max()) < TOLERANCES[actual.dtype]["rtol"] / 4, errors


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_outs", "num_ins"),
    [
        (1, 2, 8, 72, 80),
        (5, 3, 6, 64, 144),
        (40, 1, 1, 40, 36),  # one expert, several tiles of it
        (70, 2, 3, 130, 130),
        pytest.param(150, 2, 3, 20, 72, marks=pytest.mark.full),
        pytest.param(300, 2, 2, 136, 40, marks=pytest.mark.full),
    ],
)
def test_products(
    device: str,
    randn: Randn,
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_outs: int,
    num_ins: int,
) -> None:
    x = randn(num_tokens, num_ins + 8, dtype=dtype)[:, :num_ins]  # strided
    weight, bias = randn(num_experts * num_outs, num_ins, dtype=dtype), randn(num_experts * num_outs, dtype=dtype)
    expert_ids = choices(device, num_tokens, top_k, num_experts)
    routes = plan_routes(expert_ids, num_experts)
    first = grouped_linear(x, weight, routes, bias=bias)
    assert_close(first, grouped_linear_reference(x.double(), weight, expert_ids, num_experts, bias=bias))
    back, factors = randn(num_experts * 24, num_outs, dtype=dtype), randn(num_tokens, top_k)
    second = grouped_linear(first, back, routes, factors=factors)
    assert_close(second, grouped_linear_reference(first.double(), back, expert_ids, num_experts, factors=factors))


def test_routes_of_nobody_change_no_others(device: str, randn: Randn) -> None:
    """Their expert is the one behind the last: another rank's."""
    x, weight = randn(20, 40), randn(3 * 24, 40)
    expert_ids = choices(device, 20, 2, 5)  # one of which nobody chooses
    is_ours = expert_ids.flatten() < 3
    assert 0 < is_ours.sum() < len(is_ours)
    out = grouped_linear(x, weight, plan_routes(expert_ids, 3))
    expected = grouped_linear_reference(x.double(), weight, expert_ids.clamp(max=2), 3)
    assert_close(out[is_ours], expected[is_ours])


@pytest.mark.parametrize("weight_dtype", [torch.int8, FP8_DTYPE])
def test_weights_in_8_bits(device: str, randn: Randn, weight_dtype: torch.dtype) -> None:
    x, scale = randn(6, 96, dtype=torch.bfloat16), randn(4 * 40).abs() + 0.1
    values = (randn(4 * 40, 96) * 40).round().clamp(-127, 127).to(weight_dtype)
    expert_ids = choices(device, 6, 2, 4)
    out = grouped_linear(x, values, plan_routes(expert_ids, 4), scale=scale)
    assert_close(out, grouped_linear_reference(x.double(), values, expert_ids, 4, scale=scale))


def test_routes_are_sorted_and_experts_without_any_are_empty(device: str) -> None:
    routes = plan_routes(torch.tensor([[3, 0], [0, 3], [1, 0]], device=device), 5)
    assert routes.order.tolist() == [1, 2, 5, 4, 0, 3]
    assert routes.starts.tolist() == [0, 3, 4, 4, 6, 6]
    assert routes.num_experts == 5


def test_one_row_does_not_change_another(device: str, randn: Randn) -> None:
    """A row that holds NaN stays alone, also in the same tile, and whatever number of rows is beside it."""
    x, weight = randn(9, 64, dtype=torch.float16), randn(3 * 40, 64, dtype=torch.float16)
    expert_ids = choices(device, 9, 1, 3)
    good = grouped_linear(x, weight, plan_routes(expert_ids, 3))
    assert torch.equal(grouped_linear(x[2:4], weight, plan_routes(expert_ids[2:4], 3)), good[2:4])
    x[4] = torch.nan
    spoilt = grouped_linear(x, weight, plan_routes(expert_ids, 3))
    others = [row for row in range(9) if row != 4]
    assert spoilt[4].isnan().all()
    assert torch.equal(spoilt[others], good[others])


def test_no_rows(device: str, randn: Randn) -> None:
    routes = plan_routes(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert grouped_linear(randn(0, 16), randn(12, 16), routes).shape == (0, 4)


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    x, weight = randn(2, 32), randn(3 * 8, 32)
    routes = plan_routes(torch.zeros(2, 2, dtype=torch.int64, device=device), 3)
    for given, options, message in (
        ((x[:, :16], weight), {}, r"x has shape \(2, 16\), expected \[num_rows, 32\]"),
        ((x.double(), weight), {}, r"x has dtype torch\.float64"),
        ((x, weight[:22]), {}, r"weight has shape \(22, 32\), expected \[21, in_features\]"),
        ((x, weight.half()), {}, r"weight has dtype torch\.float16, expected torch\.float32"),
        ((x, weight), {"bias": x[0]}, r"bias has shape \(32,\), expected \[24\]"),
        ((x, weight), {"scale": weight[:, 0].half()}, r"scale has dtype torch\.float16"),
        ((x, weight), {"factors": x[0]}, r"factors has shape \(32,\), expected 4 contiguous numbers"),
        ((x[:1].expand(3, 32), weight), {}, "x has 3 rows, expected a divisor of 4 routes"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_linear(*given, routes, **options)
