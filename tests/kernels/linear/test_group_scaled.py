"""Products with weights scaled in groups, against float64: tails, every tile, splits, groups of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear.group_scaled import dequantise_groups, dequantise_groups_reference, group_scaled_linear

Randn = Callable[..., torch.Tensor]
# The error of a row relative to its norm: half a unit in the last place, plus a thousandth of that for fp32 sums.
ROW_ERRORS = {torch.float16: 1.001 * 2**-11, torch.bfloat16: 1.001 * 2**-8}
Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]


def stored(
    randn: Randn, num_outs: int, num_ins: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> Stored:
    """A weight with a scale for each group. Integers also have a zero for each group."""
    num_groups = -(-num_ins // group_size)
    scale = (randn(num_outs, num_groups).abs() * 0.01 + 0.001).to(scale_dtype)
    numbers = randn(num_outs, num_ins) * 50
    if dtype == FP8_DTYPE:
        return numbers.to(FP8_DTYPE), scale, None, group_size
    if dtype == torch.int8:
        zero = (randn(num_outs, num_groups) * 20).to(torch.int8)
        return numbers.clamp(-128, 127).to(torch.int8), scale, zero, group_size
    halves = (numbers.abs() % 16).to(torch.uint8)
    zero = (randn(num_outs, num_groups).abs() * 100 % 16).to(torch.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4, scale, zero, group_size


def expected_product(x: torch.Tensor, weight: Stored, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float64 with dequantised weights."""
    product = x.double() @ dequantise_groups_reference(*weight, x.dtype).double().T
    return product if bias is None else product + bias.double()


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.nan_to_num(nan=torch.inf).max()) < ROW_ERRORS[actual.dtype], errors


FORMATS = [(torch.uint8, torch.float16), (torch.int8, torch.bfloat16), (FP8_DTYPE, torch.float32)]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("value_dtype", "scale_dtype", "dtype"),
    [(*FORMATS[0], torch.bfloat16), (*FORMATS[1], torch.float16), (*FORMATS[2], torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_outs", "num_ins", "group_size", "num_splits"),
    [
        (1, 64, 256, 128, 1),
        (1, 200, 1152, 128, 4),  # a tail of outputs, splits of unequal length
        (3, 65, 300, 128, 1),  # a partial group
        (16, 7, 192, 64, 1),
        (17, 130, 320, 32, 2),
        (33, 100, 256, 128, 2),
        (40, 50, 288, 96, 1),  # steps of 32
        (64, 40, 90, 90, 1),  # one group, of any size
        (200, 90, 384, 128, 1),
        (2, 40, 256, 128, 8),  # splits without features
    ],
)
def test_products(
    randn: Randn,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    num_tokens: int,
    num_outs: int,
    num_ins: int,
    group_size: int,
    num_splits: int,
) -> None:
    x = randn(num_tokens, num_ins + 8, dtype=dtype)[:, :num_ins]  # strided
    values, scale, zero, _ = stored(randn, num_outs + 3, num_ins, group_size, value_dtype, scale_dtype)
    weight = values[3:], scale[3:], None if zero is None else zero[3:], group_size
    for bias in (None, randn(num_outs, dtype=dtype)):
        assert_rows_close(group_scaled_linear(x, *weight, bias, num_splits), expected_product(x, weight, bias))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value_dtype", "scale_dtype"), FORMATS)
@pytest.mark.parametrize(("num_outs", "num_ins", "group_size"), [(1, 32, 32), (5, 2304, 128), (3, 2500, 2500)])
def test_a_slab_is_dequantised_as_torch_does(
    randn: Randn,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    num_outs: int,
    num_ins: int,
    group_size: int,
) -> None:
    weight = stored(randn, num_outs, num_ins, group_size, value_dtype, scale_dtype)
    assert torch.equal(dequantise_groups(*weight, dtype), dequantise_groups_reference(*weight, dtype))


def test_integers_without_zeros(randn: Randn) -> None:
    x, (values, scale, _, size) = (
        randn(2, 128, dtype=torch.float16),
        stored(randn, 40, 128, 64, torch.int8, torch.float32),
    )
    weight = values, scale, None, size
    assert_rows_close(group_scaled_linear(x, *weight, None, 1), expected_product(x, weight, None))


def test_one_row_does_not_change_another(randn: Randn) -> None:
    x, weight = randn(20, 160, dtype=torch.float16), stored(randn, 70, 160, 32, torch.uint8, torch.float16)
    good = group_scaled_linear(x, *weight, None, 1)
    x[4] = torch.nan
    spoilt = group_scaled_linear(x, *weight, None, 1)
    others = [row for row in range(20) if row != 4]
    assert spoilt[4].isnan().all()
    assert torch.equal(spoilt[others], good[others])


def test_wrong_arguments_are_refused(randn: Randn) -> None:
    x, (values, scale, zero, size) = (
        randn(2, 128, dtype=torch.float16),
        stored(randn, 8, 128, 32, torch.uint8, torch.float16),
    )
    for arguments, message in (
        ((x[:, :64], values, scale, zero, size, None, 1), r"x has shape \(2, 64\), expected \[num_tokens, 128\]"),
        ((x, values, scale[:, :2], zero, size, None, 1), r"scale has shape \(8, 2\), expected \[8, 4\]"),
        ((x, values, scale, zero[:4], size, None, 1), r"zero has shape \(4, 4\), expected \[8, 4\]"),
        ((x, values, scale, zero.float(), size, None, 1), r"zero has dtype torch\.float32"),
        ((x, values, scale.T.contiguous().T, zero, size, None, 1), "scale is not contiguous"),
        ((x, values.int(), scale, zero, size, None, 1), r"values has dtype torch\.int32"),
        ((x, values, scale, zero, 40, None, 1), "group_size is 40, expected a multiple of 32"),
        ((x, values, scale, zero, size, None, 0), "num_splits is 0"),
        ((x.repeat(129, 1), values, scale, zero, size, None, 1), "x has 258 rows, expected at most 256"),
    ):
        with pytest.raises(ValueError, match=message):
            group_scaled_linear(*arguments)
