"""A layer of experts for a few tokens against float64: tails, routes to no expert, every format and activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear.few_routes import (
    MAX_FEW_ROUTES,
    ExpertMatrix,
    Gate,
    are_few_routes,
    few_down,
    few_down_reference,
    few_gate_up,
)
from kvrelay.kernels.rows.activation import clamped_swiglu_reference, silu_mul_reference
from tests.kernels.conftest import DTYPES
from tests.kernels.linear.test_grouped import assert_close, choices

Randn = Callable[..., torch.Tensor]


def matrix(randn: Randn, num_rows: int, num_ins: int, dtype: torch.dtype, *, has_bias: bool) -> ExpertMatrix:
    """Rows that are strided and begin behind others'. 8 bits have scales."""
    values = randn(num_rows + 1, num_ins + 16)
    bias = randn(num_rows, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype) if has_bias else None
    if dtype.itemsize > 1:
        return ExpertMatrix(values.to(dtype)[1:, :num_ins], None, bias)
    values = (values * 40).round().clamp(-127, 127).to(dtype)
    return ExpertMatrix(values[1:, :num_ins], randn(num_rows).abs() * 0.02 + 0.01, bias)


def route_by_route(x: torch.Tensor, weight: ExpertMatrix, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The first product in float64: each route as the only one of its token."""
    single = ids.reshape(-1, 1)
    return few_down_reference(
        x.repeat_interleave(ids.shape[1], 0), weight, single, torch.ones_like(single), num_experts
    )


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_outs", "num_ins"),
    [
        (1, 8, 12, 10, 1056),  # a tail behind the first step
        (3, 2, 8, 7, 80),
        (2, 9, 11, 4, 30),  # more experts than a step of the second product has; rows without alignment
        (1, 1, 1, 1, 1),
    ],
)
def test_both_products(
    device: str,
    randn: Randn,
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_outs: int,
    num_ins: int,
) -> None:
    x = randn(num_tokens, num_ins + 16, dtype=dtype)[:, :num_ins]
    for has_bias in (False, True):
        weight = matrix(randn, num_experts * num_outs, num_ins, dtype, has_bias=has_bias)
        ids = choices(device, num_tokens, top_k, num_experts)
        assert_close(few_gate_up(x, weight, ids, num_experts, None), route_by_route(x, weight, ids, num_experts))
        rows, factors = randn(num_tokens * top_k, num_ins, dtype=dtype), randn(num_tokens, top_k).abs()
        found = few_down(rows, weight, ids, factors.to(dtype), num_experts)
        assert_close(found, few_down_reference(rows, weight, ids, factors.to(dtype), num_experts))


@pytest.mark.parametrize("weight_dtype", [torch.int8, FP8_DTYPE])
def test_weights_in_8_bits(device: str, randn: Randn, weight_dtype: torch.dtype) -> None:
    ids, x = choices(device, 2, 3, 6), randn(2, 96, dtype=torch.bfloat16)
    first = matrix(randn, 6 * 10, 96, weight_dtype, has_bias=True)
    rows = few_gate_up(x, first, ids, 6, None)
    assert_close(rows, route_by_route(x, first, ids, 6))
    second, factors = matrix(randn, 6 * 9, 10, weight_dtype, has_bias=True), randn(2, 3).abs()
    assert_close(few_down(rows, second, ids, factors, 6), few_down_reference(rows, second, ids, factors, 6))


@pytest.mark.parametrize("gate", [Gate(), Gate(1.702, 1.5)])
def test_an_activation_is_that_of_the_rounded_products(device: str, randn: Randn, gate: Gate) -> None:
    x, ids = randn(2, 64, dtype=torch.bfloat16) * 0.2, choices(device, 2, 3, 5)
    weight = matrix(randn, 5 * 2 * 11, 64, torch.bfloat16, has_bias=True)
    products = few_gate_up(x, weight, ids, 5, None)
    if gate.limit is None:
        expected = silu_mul_reference(products)
    else:
        assert (products.abs() > gate.limit).any()
        expected = clamped_swiglu_reference(products, gate.alpha, gate.limit)
    found = few_gate_up(x, weight, ids, 5, gate)
    torch.testing.assert_close(
        found, expected, rtol=2**-7, atol=1e-30
    )  # the exponential's last bit may move a rounding


@pytest.mark.usefixtures("poisoned_empty")
def test_a_route_to_no_expert_adds_nothing(device: str, randn: Randn) -> None:
    x, ids = randn(2, 48), torch.tensor([[1, 3, 0], [3, 3, 3]], device=device)  # three experts: 3 is none
    first, second = (matrix(randn, 3 * num, 48, torch.float32, has_bias=True) for num in (48, 5))
    factors = randn(2, 3).abs()
    rows = few_gate_up(x, first, ids, 3, None)
    assert rows[1].isnan().all()
    out = few_down(rows, second, ids, factors, 3)
    assert_close(out[:1], few_down_reference(rows, second, ids, factors, 3)[:1])
    assert not out[1].any()


def test_offsets_beyond_31_bits(device: str, randn: Randn) -> None:
    """Rows of the weight are 2**29 elements apart. Untouched pages take no memory."""
    values, ids = randn(8, 32).half(), torch.tensor([[3, 2]], device=device)
    far = torch.empty(7 * 2**29 + 32, dtype=torch.float16, device=device).as_strided((8, 32), (2**29, 1))
    far.copy_(values)
    x, rows, factors = randn(1, 32).half(), randn(2, 32).half(), randn(1, 2)
    near, apart = ExpertMatrix(values, None, None), ExpertMatrix(far, None, None)
    assert torch.equal(few_gate_up(x, apart, ids, 4, Gate()), few_gate_up(x, near, ids, 4, Gate()))
    assert torch.equal(few_down(rows, apart, ids, factors, 4), few_down(rows, near, ids, factors, 4))


def test_a_tokens_bits_do_not_depend_on_the_others(device: str, randn: Randn) -> None:
    x, ids, factors = randn(4, 64, dtype=torch.bfloat16), choices(device, 4, 3, 12), randn(4, 3)
    first, second = (matrix(randn, 12 * num, 64, torch.bfloat16, has_bias=False) for num in (128, 20))

    def layer(tokens: slice) -> torch.Tensor:
        rows = few_gate_up(x[tokens], first, ids[tokens], 12, Gate())
        return few_down(rows, second, ids[tokens], factors[tokens], 12)

    assert torch.equal(layer(slice(1, 3)), layer(slice(0, 4))[1:3])


def test_few_routes_are_at_most_as_many_as_experts() -> None:
    assert are_few_routes(8, 128)
    assert are_few_routes(MAX_FEW_ROUTES, 128)
    assert not are_few_routes(MAX_FEW_ROUTES + 1, 128)
    assert are_few_routes(8, 8)
    assert not are_few_routes(10, 8)


def test_no_tokens(device: str, randn: Randn) -> None:
    weight, ids = ExpertMatrix(randn(12, 16), None, None), torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert few_gate_up(randn(0, 16), weight, ids, 3, Gate()).shape == (0, 2)
    assert few_down(randn(0, 16), weight, ids, randn(0, 2), 3).shape == (0, 4)


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    x, weight, ids = randn(2, 32), randn(3 * 8, 32), torch.zeros(2, 2, dtype=torch.int64, device=device)
    for given, message in (
        ((x[:, :16], weight, ids), r"x has shape \(2, 16\), expected \[2, 32\]"),
        ((x.double(), weight, ids), r"x has dtype torch\.float64"),
        ((x, weight[:22], ids), "values has 22 rows, expected a multiple of 3 experts"),
        ((x, weight.half(), ids), r"values has dtype torch\.float16, expected torch\.float32"),
        ((x, weight, ids.int()), r"expert_ids has dtype torch\.int32"),
        ((x, weight, ids.T), r"expert_ids has strides \(1, 2\)"),
        ((x, weight[:21], ids), "an expert has 7 rows of gate and up, expected an even number"),
    ):
        with pytest.raises(ValueError, match=message):
            few_gate_up(given[0], ExpertMatrix(given[1], None, None), given[2], 3, Gate())
    rows, factors = randn(4, 32), randn(2, 2)
    for bias, scale, of_routes, message in (
        (x[0], None, factors, r"bias has shape \(32,\), expected \[24\]"),
        (None, weight[:, 0].half(), factors, r"scale has dtype torch\.float16"),
        (None, None, factors[:1], r"factors has shape \(1, 2\), expected \[2, 2\]"),
        (None, None, factors.T, r"factors has strides \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            few_down(rows, ExpertMatrix(weight, scale, bias), ids, of_routes, 3)
