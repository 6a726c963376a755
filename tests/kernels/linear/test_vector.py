"""Products of one row against float64: every format, tails of outputs and inputs, groups of every kind, tiles with and without
loads ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear import vector as module
from kvrelay.kernels.linear.group_scaled import dequantise_groups_reference
from kvrelay.kernels.linear.vector import (
    VectorTile,
    is_full_vector_product,
    vector_linear,
    vector_linear_reference,
    vector_rounded_linear,
    vector_stored_linear,
)
from tests.kernels.linear.test_group_scaled import FORMATS, stored
from tests.kernels.linear.test_weight_only import weights

Randn = Callable[..., torch.Tensor]
# The error of the row relative to its norm: half a unit in the last place, and a little for fp32 sums.
ERRORS = {torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-8}
DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < ERRORS[actual.dtype], error


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outs", "num_ins"), [(8, 1024), (7, 1056), (1, 32), (5, 2560)])
def test_full_weights(randn: Randn, dtype: torch.dtype, num_outs: int, num_ins: int) -> None:
    x, weight = randn(1, num_ins, dtype=dtype), randn(num_outs + 3, num_ins + 32, dtype=dtype)[3:, :num_ins]
    for bias in (None, randn(num_outs, dtype=dtype)):
        assert_close(vector_linear(x, weight, bias), vector_linear_reference(x, weight, bias))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.int8, FP8_DTYPE])
@pytest.mark.parametrize(("num_outs", "num_ins"), [(8, 2048), (7, 1056), (1, 32)])
def test_rounded_weights(
    randn: Randn, dtype: torch.dtype, weight_dtype: torch.dtype, num_outs: int, num_ins: int
) -> None:
    x, (values, scale) = randn(1, num_ins, dtype=dtype), weights(randn, num_outs + 3, num_ins + 32, weight_dtype)
    values, scale = values[3:, :num_ins], scale[3:]
    for bias in (None, randn(num_outs, dtype=dtype)):
        expected = vector_linear_reference(x, values.double() * scale.double()[:, None], bias)
        assert_close(vector_rounded_linear(x, values, scale, bias), expected)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value_dtype", "scale_dtype"), FORMATS)
@pytest.mark.parametrize(
    ("num_outs", "num_ins", "group_size"),
    [(8, 1024, 128), (7, 1120, 128), (3, 96, 32), (5, 288, 96), (2, 96, 96), (1, 64, 90)],
)
def test_stored_weights(
    randn: Randn,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    num_outs: int,
    num_ins: int,
    group_size: int,
) -> None:
    x = randn(1, num_ins, dtype=dtype)
    values, scale, zero, _ = stored(randn, num_outs + 3, num_ins, group_size, value_dtype, scale_dtype)
    weight = values[3:], scale[3:], None if zero is None else zero[3:], group_size
    exact = dequantise_groups_reference(*weight, torch.float32)  # no weight is rounded to 16 bits
    for bias in (None, randn(num_outs, dtype=dtype)):
        assert_close(vector_stored_linear(x, *weight, bias), vector_linear_reference(x, exact, bias))
    without = (values[3:], scale[3:], None, group_size)
    exact = dequantise_groups_reference(*without, torch.float32)
    assert_close(vector_stored_linear(x, *without, None), vector_linear_reference(x, exact, None))


@pytest.mark.parametrize("value_dtype", [torch.int8, torch.uint8])
def test_each_integer_has_its_value(device: str, value_dtype: torch.dtype) -> None:
    """A row of ones and zeros picks a number, which fp32 sums give exactly."""
    every = torch.arange(256, device=device).to(torch.uint8).view(value_dtype).repeat(32, 1).T.contiguous()
    scale = torch.ones(256, 1, device=device)
    halves = torch.stack((every.view(torch.uint8) & 15, every.view(torch.uint8) >> 4), dim=-1).flatten(1)
    numbers = halves if value_dtype == torch.uint8 else every
    for place in range(8):
        x = torch.zeros(1, numbers.shape[1], dtype=torch.float16, device=device)
        x[0, place] = 1
        product = vector_stored_linear(x, every, scale, None, numbers.shape[1], None)
        assert torch.equal(product[0], numbers[:, place].half()), place


@pytest.mark.parametrize("tile", [VectorTile(2, 1, 1), VectorTile(8, 2, 3)])
def test_every_tile(randn: Randn, tile: VectorTile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, (values, scale, zero, size) = (
        randn(1, 4224, dtype=torch.float16),
        stored(randn, 9, 4224, 64, torch.uint8, torch.float16),
    )
    monkeypatch.setattr(module, "vector_tile", lambda *_: tile)
    exact = dequantise_groups_reference(values, scale, zero, size, torch.float32)
    product = vector_stored_linear(x, values, scale, zero, size, None)
    assert_close(product, vector_linear_reference(x, exact, None))
    assert torch.equal(product, vector_stored_linear(x, values, scale, zero, size, None))


def test_matrices_that_cublas_reads_as_fast_as_memory_goes_are_left_to_it() -> None:
    # Llama-3-8B: fused QKV, o, fused gate and up, down; then the head, a router, inputs that are no whole pieces.
    assert all(is_full_vector_product(*of) for of in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)))
    assert not any(is_full_vector_product(*shape) for shape in ((128256, 4096), (8, 4096), (4096, 4104)))


def test_wrong_arguments_are_refused(randn: Randn) -> None:
    x, weight = randn(1, 64, dtype=torch.float16), randn(8, 64, dtype=torch.float16)
    for arguments, message in (
        ((x.repeat(2, 1), weight, None), r"x has shape \(2, 64\), expected \[1, 64\]"),
        ((x.float(), weight.float(), None), r"x has dtype torch\.float32"),
        ((x, weight.bfloat16(), None), r"weight has dtype torch\.bfloat16, expected torch\.float16"),
        ((x, weight.T.contiguous().T, None), "weight has last stride 8"),
        ((x[:, :40], weight[:, :40], None), "x has 40 features, expected a multiple of 32"),
        ((x, weight, randn(4, dtype=torch.float16)), r"bias has shape \(4,\), expected \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            vector_linear(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes and bits of a device")
@pytest.mark.parametrize("num_outs", [4096, 28672])
def test_large_matrices_on_a_device(randn: Randn, num_outs: int) -> None:
    x, weight = randn(1, 4096, dtype=torch.bfloat16), randn(num_outs, 4096, dtype=torch.bfloat16)
    assert_close(vector_linear(x, weight, None), vector_linear_reference(x, weight, None))
    values, scale, zero, size = stored(randn, num_outs, 4096, 128, torch.uint8, torch.bfloat16)
    exact = dequantise_groups_reference(values, scale, zero, size, torch.float32)
    product = vector_stored_linear(x, values, scale, zero, size, None)
    assert_close(product, vector_linear_reference(x, exact, None))
    assert torch.equal(product, vector_stored_linear(x, values, scale, zero, size, None))
