"""Products with experts' weights against float64: tails, unused experts, one expert for all rows, every tile and
format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear.group_scaled import dequantise_groups_reference
from kvrelay.kernels.linear.grouped import (
    grouped_linear,
    grouped_linear_reference,
    grouped_stored_linear,
    plan_routes,
)
from tests.kernels.conftest import DTYPES, TOLERANCES

from .test_group_scaled import FORMATS, Stored, stored

Randn = Callable[..., torch.Tensor]


def choices(device: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Distinct experts for each token. The last expert is unused if top_k allows it."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if top_k < num_experts:
        scores[:, -1] = -1
    return scores.topk(top_k).indices.to(device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows relative to their norms, because sums have many terms as large as the result."""
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
    """Routes to the id after the last expert belong to another rank. They do not change other rows."""
    x, weight = randn(20, 40), randn(3 * 24, 40)
    expert_ids = choices(device, 20, 2, 5)  # one expert is unused
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


def mxfp4(num_rows: int, num_ins: int, device: str, low: int = 118, high: int = 134) -> Stored:
    """All sixteen values, and scales of many sizes."""
    generator = torch.Generator().manual_seed(num_ins)
    values = torch.randint(0, 256, (num_rows, num_ins // 2), generator=generator).to(device, torch.uint8)
    scale = torch.randint(low, high, (num_rows, -(-num_ins // 32)), generator=generator).to(device, torch.uint8)
    return values, scale, None, 32


def check_stored(device: str, randn: Randn, weight: Stored, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Compare a product of stored weights with full weights, plain and with bias and factors. ``sizes``: tokens, top_k,
    experts."""
    num_tokens, top_k, num_experts = sizes
    full = dequantise_groups_reference(*weight, dtype)
    x, bias = randn(num_tokens, full.shape[1] + 8, dtype=dtype)[:, :-8], randn(len(full), dtype=dtype)
    expert_ids = choices(device, num_tokens, top_k, num_experts)
    routes, factors = plan_routes(expert_ids, num_experts), randn(num_tokens, top_k)
    for given in ({}, {"bias": bias, "factors": factors}):
        out = grouped_stored_linear(x, *weight, routes, **given)
        assert_close(out, grouped_linear_reference(x.double(), full, expert_ids, num_experts, **given))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize(("num_tokens", "num_ins"), [(1, 64), (3, 320), (40, 96), (150, 288)])
def test_mxfp4(device: str, randn: Randn, dtype: torch.dtype, num_tokens: int, num_ins: int) -> None:
    """Steps of four groups, the last ones partly missing, and every tile."""
    check_stored(device, randn, mxfp4(3 * 72, num_ins, device), (num_tokens, 2, 3), dtype)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("value_dtype", "scale_dtype", "dtype"),
    [(*FORMATS[0], torch.bfloat16), (*FORMATS[1], torch.float16), (*FORMATS[2], torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_ins", "group_size"),
    [(1, 256, 128), (5, 300, 128), (40, 192, 64), (9, 288, 96), (150, 90, 90), (4, 192, 32)],
)
def test_weights_in_groups(
    device: str,
    randn: Randn,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    num_tokens: int,
    num_ins: int,
    group_size: int,
) -> None:
    """Groups of one step, a part of a step, several steps, and all inputs."""
    weight = stored(randn, 3 * 40, num_ins, group_size, value_dtype, scale_dtype)
    check_stored(device, randn, weight, (num_tokens, 2, 3), dtype)


def test_very_small_and_very_large_powers_of_two(device: str) -> None:
    """The smallest and largest powers of two that bf16 has with every MXFP4 value."""
    weight = mxfp4(2 * 8, 64, device)
    weight[1][:, 0], weight[1][:, 1] = 2, 251
    routes = plan_routes(torch.tensor([[0, 1]], device=device), 2)
    for x in (torch.eye(64, device=device)[0], torch.eye(64, device=device)[40]):
        out = grouped_stored_linear(x[None].bfloat16(), *weight, routes)
        expected = dequantise_groups_reference(*weight, torch.bfloat16) @ x.bfloat16()
        assert torch.equal(out.flatten(), expected)


def test_routes_are_sorted_and_experts_without_any_are_empty(device: str) -> None:
    routes = plan_routes(torch.tensor([[3, 0], [0, 3], [1, 0]], device=device), 5)
    assert routes.order.tolist() == [1, 2, 5, 4, 0, 3]
    assert routes.starts.tolist() == [0, 3, 4, 4, 6, 6]
    assert routes.num_experts == 5


def test_one_row_does_not_change_another(device: str, randn: Randn) -> None:
    """NaN in one row leaves all others bit-identical, and a row's result does not depend on the number of rows."""
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


def test_wrong_stored_weights_are_refused(device: str, randn: Randn) -> None:
    values, scale, _, size = mxfp4(3 * 8, 64, device)
    x, routes = randn(2, 64, dtype=torch.bfloat16), plan_routes(torch.zeros(2, 2, dtype=torch.int64, device=device), 3)
    for given, options, message in (
        ((x[:, :32], values, scale, None, size), {}, r"x has shape \(2, 32\), expected \[num_rows, 64\]"),
        ((x.float(), values, scale, None, size), {}, r"x has dtype torch\.float32"),
        ((x, values[:22], scale[:22], None, size), {}, "the weight has 22 rows, expected a multiple of 3 experts"),
        ((x, values, scale[:, :1], None, size), {}, r"scale has shape \(24, 1\), expected \[24, 2\]"),
        ((x, values, scale, scale, size), {}, r"scale has dtype torch\.uint8"),  # MXFP4 has no zeros
        ((x, values.view(torch.int8), scale, None, size), {}, r"scale has"),
        ((x, values, scale, None, 20), {}, "group_size is 20, expected a multiple of 32"),
        ((x, values, scale, None, size), {"bias": x[0]}, r"bias has shape \(64,\), expected \[24\]"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_stored_linear(*given, routes, **options)
