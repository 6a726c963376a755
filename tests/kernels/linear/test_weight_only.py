"""Products with 8-bit weights against float64: shapes with tails, every tile, splits, scales and rows of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.checks import FP8_DTYPE
from kvrelay.kernels.linear import weight_only as module
from kvrelay.kernels.linear.weight_only import (
    MAX_ROWS,
    dequantise_weight,
    dequantise_weight_reference,
    linear_splits,
    weight_only_linear,
    weight_only_linear_reference,
)

Randn = Callable[..., torch.Tensor]
FORMATS = [torch.int8, FP8_DTYPE]
# The error of a row relative to its norm: its elements are rounded once, and fp32 sums add a thousandth of that.
ROW_ERRORS = {torch.float16: 4e-4, torch.bfloat16: 3e-3}


def weights(randn: Randn, num_outs: int, num_ins: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that cover the format's values, with a scale for each row."""
    values = randn(num_outs, num_ins) * 40
    values.view(-1)[: num_outs * num_ins // 2] *= 3
    values = (
        values.round().clamp(-127, 127).to(torch.int8) if dtype == torch.int8 else values.clamp(-448, 448).to(dtype)
    )
    return values, randn(num_outs).abs() * 0.01


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert float(errors.nan_to_num(nan=torch.inf).max()) < ROW_ERRORS[actual.dtype], errors


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("weight_dtype", "dtype"), [(FORMATS[0], torch.bfloat16), (FORMATS[1], torch.float16)])
@pytest.mark.parametrize(
    ("num_tokens", "num_outs", "num_ins", "num_splits"),
    [
        (1, 64, 128, 1),
        (1, 200, 1040, 4),  # tails of outputs and of the last split
        (3, 65, 80, 1),
        (16, 7, 36, 1),  # unaligned rows of the weight
        (17, 130, 300, 2),
        (33, 100, 257, 2),
        (64, 129, 384, 1),
        (64, 129, 384, 3),
        (200, 90, 80, 1),
        (200, 130, 140, 2),
        (2, 40, 200, 8),  # splits without features
    ],
)
def test_products(
    randn: Randn,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_tokens: int,
    num_outs: int,
    num_ins: int,
    num_splits: int,
) -> None:
    x = randn(num_tokens, num_ins + 8, dtype=dtype)[:, :num_ins]  # strided
    values, scale = weights(randn, num_outs, num_ins + 16, weight_dtype)
    values, bias = values[:, :num_ins], randn(num_outs, dtype=dtype)
    for one in (None, bias):
        expected = weight_only_linear_reference(x.double(), values, scale, one)
        assert_rows_close(weight_only_linear(x, values, scale, one, num_splits), expected)


def test_no_rows(randn: Randn) -> None:
    values, scale = weights(randn, 40, 64, torch.int8)
    assert weight_only_linear(randn(0, 64, dtype=torch.float16), values, scale, None, 2).shape == (0, 40)


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_scales_and_rows_of_any_size(randn: Randn, weight_dtype: torch.dtype, num_splits: int) -> None:
    x, (values, scale) = randn(5, 256, dtype=torch.bfloat16), weights(randn, 48, 256, weight_dtype)
    x[2] = 0
    values.view(torch.uint8)[7] = 0
    scale[:4] = torch.tensor([0.0, 1e-30, 1e30, 1e33])
    out = weight_only_linear(x, values, scale, None, num_splits)
    exact = (x.double() @ values.double().T) * scale.double()
    largest = exact.abs().amax(dim=0, keepdim=True).clamp(min=1e-40)  # outputs are 60 powers of ten apart
    torch.testing.assert_close(out.double() / largest, exact / largest, rtol=2**-8, atol=1e-6)
    assert (out[2] == 0).all()
    assert (out[:, 0] == 0).all()
    assert (out[:, 7] == 0).all()


def test_one_row_does_not_change_another(randn: Randn) -> None:
    """NaN in one row leaves all others in its tile bit-identical."""
    x, (values, scale) = randn(20, 160, dtype=torch.float16), weights(randn, 70, 160, torch.int8)
    good = weight_only_linear(x, values, scale, None, 1)
    x[4] = torch.nan
    spoilt = weight_only_linear(x, values, scale, None, 1)
    assert spoilt[4].isnan().all()
    others = [row for row in range(20) if row != 4]
    assert torch.equal(spoilt[others], good[others])


@pytest.mark.full
def test_whole_numbers_are_exact_however_they_are_cut(randn: Randn) -> None:
    """fp32 holds these sums exactly, so every tile and every split must give the same bits."""
    x = (randn(200, 450) * 2).round().to(torch.float16)
    values, scale = weights(randn, 40, 450, torch.int8)[0] // 16, torch.full((40,), 0.25, device=x.device)
    expected = ((x.double() @ values.double().T) * 0.25).half()
    for num_tokens in (1, 16, 17, 33, 64, 65, 200):
        for num_splits in (1, 2, 4):
            result = weight_only_linear(x[:num_tokens], values, scale, None, num_splits)
            assert torch.equal(result, expected[:num_tokens]), (num_tokens, num_splits)


def test_splits_fill_the_device_and_depend_on_no_row() -> None:
    # Llama-3-8B on an H200: fused QKV, o, fused gate and up, down.
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert [linear_splits(132, *shape) for shape in shapes] == [4, 8, 1, 8]
    assert linear_splits(132, 64, 896) == 1  # too short to be cut
    assert linear_splits(132, 64, 897) == 2
    assert linear_splits(1, 64, 65536) == 1
    tiles = [module.tile_of(num_tokens) for num_tokens in range(1, MAX_ROWS + 1)]
    assert all(module.SPLIT_UNIT % tile.ins == 0 and tile.outs <= module._WIDE_OUTS for tile in tiles)
    assert all(tile.tokens >= min(rows, 128) for rows, tile in enumerate(tiles, 1))


def test_offsets_beyond_31_bits(device: str, randn: Randn) -> None:
    """Rows of weight and activations are 2**30 and more elements apart. Untouched pages take no memory."""
    far = torch.empty(3 * 2**30 + 64, dtype=torch.int8, device=device).as_strided((4, 64), (2**30, 1))
    values, scale = weights(randn, 4, 64, torch.int8)
    far.copy_(values)
    wide = torch.empty(2**31 + 64, dtype=torch.float16, device=device).as_strided((3, 64), (2**30, 1))
    x = randn(3, 64, dtype=torch.float16)
    wide.copy_(x)
    assert torch.equal(weight_only_linear(wide, far, scale, None, 1), weight_only_linear(x, values, scale, None, 1))
    assert torch.equal(
        dequantise_weight(far, scale, torch.float16), dequantise_weight_reference(values, scale, torch.float16)
    )


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize(("num_outs", "num_ins"), [(1, 16), (5, 1024), (3, 2500)])
def test_a_slab_is_dequantised_as_torch_does(
    randn: Randn, dtype: torch.dtype, weight_dtype: torch.dtype, num_outs: int, num_ins: int
) -> None:
    values, scale = weights(randn, num_outs + 2, num_ins, weight_dtype)
    slab = slice(1, num_outs + 1)
    out = dequantise_weight(values[slab], scale[slab], dtype)
    assert torch.equal(out, dequantise_weight_reference(values[slab], scale[slab], dtype))
    exact = values[slab].double() * scale[slab, None].double()
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=2**-25)


def test_the_reference_is_torchs_product_with_dequantised_weights(randn: Randn) -> None:
    values, scale = weights(randn, 30, 50, torch.int8)
    x, bias = randn(4, 50, dtype=torch.float16), randn(30, dtype=torch.float16)
    exact = torch.nn.functional.linear(x.double(), values.double() * scale.double()[:, None], bias.double())
    torch.testing.assert_close(weight_only_linear_reference(x.double(), values, scale, bias), exact)
    assert_rows_close(weight_only_linear_reference(x, values, scale, bias), exact)


def test_wrong_arguments_are_refused(randn: Randn) -> None:
    x, (values, scale) = randn(2, 32, dtype=torch.float16), weights(randn, 8, 32, torch.int8)
    for arguments, message in (
        ((x[:, :16], values, scale, None, 1), r"x has shape \(2, 16\), expected \[num_tokens, 32\]"),
        (
            (x.float(), values, scale, None, 1),
            r"x has dtype torch\.float32, expected torch\.float16 or torch\.bfloat16",
        ),
        ((randn(2, 64, dtype=torch.float16)[:, ::2], values, scale, None, 1), "x has last stride 2"),
        ((x.repeat(129, 1), values, scale, None, 1), "x has 258 rows, expected at most 256: multiply with dequantised"),
        ((x, values.half(), scale, None, 1), r"weight has dtype torch\.float16, expected torch\.int8 or torch\.float8"),
        ((x, values.T.contiguous().T, scale, None, 1), "weight has last stride 8, expected 1"),
        ((x, values, scale[:4], None, 1), r"scale has shape \(4,\), expected \[8\]"),
        ((x, values, scale.half(), None, 1), r"scale has dtype torch\.float16"),
        ((x, values, scale, scale[:4].half(), 1), r"bias has shape \(4,\), expected \[8\]"),
        ((x, values, scale, scale, 1), r"bias has dtype torch\.float32, expected torch\.float16"),
        ((x, values, scale, None, 0), "num_splits is 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            weight_only_linear(*arguments)
    with pytest.raises(ValueError, match=r"the result has dtype torch\.float32"):
        dequantise_weight(values, scale, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes and bits of a device")
@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_a_rows_bits_do_not_depend_on_the_batch(randn: Randn, weight_dtype: torch.dtype) -> None:
    """docs/kernels.md promises this within calls of 2 to 32 rows, and of 33 and more. The engine multiplies one row elsewhere."""
    x, (values, scale) = randn(MAX_ROWS, 4096, dtype=torch.bfloat16), weights(randn, 4096, 4096, weight_dtype)
    for sizes in ((1, 2, 7, 16, 17, 32), (33, 64, 65, 128, MAX_ROWS)):
        results = [weight_only_linear(x[:size], values, scale, None, 8) for size in sizes]
        for size, result in zip(sizes, results, strict=True):
            assert torch.equal(result, results[-1][:size]), size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes and bits of a device")
def test_many_rows_and_shapes_on_a_device(randn: Randn) -> None:
    """The interpreter would take minutes for these sizes."""
    for num_tokens, num_outs, num_ins in ((1, 6144, 4096), (32, 4096, 14336), (64, 28672, 4096), (256, 4096, 4096)):
        x, (values, scale) = (
            randn(num_tokens, num_ins, dtype=torch.bfloat16),
            weights(randn, num_outs, num_ins, torch.int8),
        )
        num_splits = linear_splits(132, num_outs, num_ins)
        expected = weight_only_linear_reference(x.double(), values, scale)
        assert_rows_close(weight_only_linear(x, values, scale, None, num_splits), expected)
