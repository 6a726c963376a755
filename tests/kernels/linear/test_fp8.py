"""Products of fp8 with fp8 against float64: rounding of rows, tails, every tile, splits, groups of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear.fp8 import (
    Fp8Rows,
    fp8_linear,
    fp8_linear_reference,
    round_rows,
    round_rows_reference,
)

Randn = Callable[..., torch.Tensor]
# The error of a row relative to its norm: its elements are rounded once, and sums are fp32.
ROW_ERRORS = {torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-8}


def weight_of(
    randn: Randn, num_outs: int, num_ins: int, group_size: int, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, int]:
    scale = (randn(num_outs, -(-num_ins // group_size)).abs() * 0.01 + 0.001).to(scale_dtype)
    return (randn(num_outs, num_ins) * 80).clamp(-448, 448).to(FP8_DTYPE), scale, group_size


def rounded_of(rows: Fp8Rows) -> torch.Tensor:
    """The values of rounded rows."""
    of_inputs = torch.arange(rows.values.shape[1], device=rows.values.device) // rows.group_size
    return rows.values.float() * rows.scale[:, of_inputs]


def assert_same_rows(found: Fp8Rows, expected: Fp8Rows) -> None:
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.nan_to_num(nan=torch.inf).max()) < ROW_ERRORS[actual.dtype], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_ins", "group_size", "scale"),
    [
        (64, 64, None),
        (2500, 2500, None),  # several steps, and a tail
        (384, 128, None),
        (300, 32, None),  # a partial group
        (80, 80, 0.004),  # most values are clipped
    ],
)
def test_rows_are_rounded_as_torch_rounds_them(
    device: str, randn: Randn, dtype: torch.dtype, num_ins: int, group_size: int, scale: float | None
) -> None:
    sizes = torch.tensor([[1e-4], [1.0], [100.0], [0.0], [3.0]], device=device)
    x = (randn(5, num_ins + 8) * sizes)[:, :num_ins].to(dtype)
    assert_same_rows(round_rows(x, group_size, scale), round_rows_reference(x, group_size, scale))


@pytest.mark.parametrize(
    ("scheme", "group_size"), [({"strategy": "token"}, 256), ({"strategy": "group", "group_size": 64}, 64)]
)
def test_rows_are_rounded_as_the_library_of_the_checkpoints_says(
    randn: Randn, scheme: dict[str, Any], group_size: int
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")  # the other tests run without it
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    arguments = quantization.QuantizationArgs(num_bits=8, type="float", dynamic=True, symmetric=True, **scheme)
    x = randn(1, 7, 256)
    scale, zero = utils.compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module())
    theirs = lifecycle.fake_quantize(x, scale, zero, arguments)
    ours = rounded_of(round_rows_reference(x[0], group_size, None))
    torch.testing.assert_close(ours, theirs[0], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("num_rows", "num_outs", "num_ins", "x_group", "group", "num_splits"),
    [
        (1, 200, 1152, 1152, 1152, 4),  # a tail of outputs, and splits of unequal length
        (3, 65, 80, 80, 80, 1),
        (16, 7, 36, 36, 36, 1),  # unaligned rows
        pytest.param(17, 130, 320, 320, 320, 2, marks=pytest.mark.full),
        (64, 129, 384, 384, 384, 1),
        (130, 40, 200, 200, 200, 1),  # more than one tile
        pytest.param(1, 200, 1152, 128, 128, 4, marks=pytest.mark.full),
        (3, 65, 300, 128, 128, 1),  # a partial group
        pytest.param(17, 70, 320, 32, 32, 2, marks=pytest.mark.full),
        pytest.param(40, 50, 288, 96, 96, 1, marks=pytest.mark.full),  # steps of 32
        (33, 100, 256, 256, 128, 1),  # groups of the weight only
        pytest.param(5, 100, 256, 64, 256, 1, marks=pytest.mark.full),  # groups of the rows only
        (70, 40, 256, 128, 128, 2),
        (2, 40, 200, 200, 200, 8),  # splits without features
    ],
)
def test_products(
    randn: Randn,
    dtype: torch.dtype,
    num_rows: int,
    num_outs: int,
    num_ins: int,
    x_group: int,
    group: int,
    num_splits: int,
) -> None:
    rows = round_rows(randn(num_rows, num_ins, dtype=dtype), x_group, None)
    values, scale, _ = weight_of(randn, num_outs + 3, num_ins + 16, num_ins + 16)
    values, scale = values[3:, :num_ins], weight_of(randn, num_outs, num_ins, group)[1]  # strided
    for bias in (None, randn(num_outs, dtype=dtype)):
        expected = fp8_linear_reference(rows, values, scale, group, bias)
        assert_rows_close(fp8_linear(rows, values, scale, group, bias, num_splits), expected)


def test_scales_may_be_in_the_models_type(randn: Randn) -> None:
    rows = round_rows(randn(4, 128, dtype=torch.bfloat16), 128, 0.01)
    weight = weight_of(randn, 40, 128, 64, torch.bfloat16)
    assert_rows_close(fp8_linear(rows, *weight, None, 1), fp8_linear_reference(rows, *weight, None))


def test_no_rows(randn: Randn) -> None:
    rows = round_rows(randn(0, 64, dtype=torch.float16), 64, None)
    assert fp8_linear(rows, *weight_of(randn, 40, 64, 64), None, 1).shape == (0, 40)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy warns of it, a GPU does not
def test_one_row_does_not_change_another(randn: Randn) -> None:
    x, weight = randn(20, 160, dtype=torch.float16), weight_of(randn, 40, 160, 160)
    good = fp8_linear(round_rows(x, 160, None), *weight, None, 1)
    x[4], x[7, 3] = torch.nan, torch.inf
    spoilt = fp8_linear(round_rows(x, 160, None), *weight, None, 1)
    others = [row for row in range(20) if row not in (4, 7)]
    assert spoilt[[4, 7]].isnan().all()
    assert torch.equal(spoilt[others], good[others])


def test_wrong_arguments_are_refused(randn: Randn) -> None:
    x, (values, scale, size) = randn(2, 128, dtype=torch.float16), weight_of(randn, 8, 128, 32)
    for arguments, message in (
        ((x.float(), 128, None), r"x has dtype torch\.float32"),
        ((x, 40, None), "x's group_size is 40, expected a multiple of 32"),
        ((x, 128, 0.0), "scale is 0.0, expected None or a number above 0"),
        ((x.T, 2, None), "x has last stride 128, expected 1"),
    ):
        with pytest.raises(ValueError, match=message):
            round_rows(*arguments)
    rows = round_rows(x, 128, None)
    for others, message in (
        ((values[:, :64], scale, size, None, 1), r"values has shape \(8, 64\), expected \[out_features, 128\]"),
        ((values.float(), scale, size, None, 1), r"values has dtype torch\.float32"),
        ((values, scale[:, :2], size, None, 1), r"scale has shape \(8, 2\), expected \[8, 4\]"),
        ((values, scale.T.contiguous().T, size, None, 1), "scale is not contiguous"),
        ((values, scale, 48, None, 1), "group_size is 48, expected a multiple of 32"),
        ((values, scale, size, randn(8), 1), r"bias has dtype torch\.float32"),
        ((values, scale, size, None, 0), "num_splits is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_linear(rows, *others)
