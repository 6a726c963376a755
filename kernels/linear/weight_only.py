"""Products with 8-bit weight matrices: `x @ (weight * scale).T`, with activations in 16 bits and sums in fp32.

A weight is int8 or e4m3 `[out_features, in_features]` with one fp32 scale per output channel. Both formats convert to bf16 and fp16
without loss. So the tensor cores multiply exactly the stored numbers, and the scale is applied once, to the sum. The engine rounds
weights when it loads them; this module does not.

Few rows are bound by the bytes of the weight. A program multiplies a tile of the weight with all rows of a token tile. If a matrix
has fewer tiles than there are multiprocessors, the input features are cut into splits. A second kernel adds the splits' sums in
order, without atomics, so equal calls give equal bits. Splits depend on the matrix and the device, not on the number of rows. Many
rows are bound by arithmetic, which the vendor's library does best: for them `dequantise_weight` writes a slab of the weight in 16
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FP8_DTYPE, require_dtype, require_shape, require_unit_stride

# Largest number of rows for which `weight_only_linear` is faster (an estimate, see docs/kernels.md). Callers multiply more in
# another way.
MAX_ROWS = 256
ROW_TILES = (16, 32, 64, MAX_ROWS)  # each has its own kernel, for up to so many rows

COMPUTE_DTYPES = (torch.float16, torch.bfloat16)
_WEIGHT_DTYPES = (torch.int8, FP8_DTYPE)
# Output channels of a wide tile, for counting splits; and the input features whose multiples splits are cut at.
_WIDE_OUTS = 128
SPLIT_UNIT = 128
_MIN_UNITS = 4  # smallest split: smaller ones cost more to add up than the parallelism gains
_SUM_BLOCK = 512
DEQUANTISE_BLOCK = 1024


@dataclass(frozen=True)
class Tile:
    """The size of a program's result, and of its steps."""

    tokens: int
    outs: int
    ins: int  # input features of one step; divides SPLIT_UNIT
    stages: int
    warps: int


def tile_of(num_tokens: int) -> Tile:
    """The tile by number of rows.

    Activations are read from the L2 for every tile of output channels, so more rows want wider tiles.
    """
    if num_tokens <= ROW_TILES[0]:
        return Tile(16, 64, 128, stages=5, warps=4)
    if num_tokens <= ROW_TILES[1]:
        return Tile(32, _WIDE_OUTS, 128, stages=3, warps=4)
    if num_tokens <= ROW_TILES[2]:
        return Tile(64, _WIDE_OUTS, 128, stages=3, warps=8)
    return Tile(128, _WIDE_OUTS, 64, stages=3, warps=8)


def linear_splits(num_multiprocessors: int, out_features: int, in_features: int) -> int:
    """The number of splits of the input features: a power of two, 1 for no splits.

    It is the smallest number that gives every multiprocessor a wide tile, as long as a split has 512 features on average.
    """
    tiles = triton.cdiv(out_features, _WIDE_OUTS)
    units = triton.cdiv(in_features, SPLIT_UNIT)
    splits = 1
    while tiles * splits < num_multiprocessors and units >= 2 * splits * _MIN_UNITS:
        splits *= 2
    return splits


def dequantise_weight_reference(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight * scale` per output channel, rounded once to `dtype`."""
    return (weight.to(torch.float32) * scale[:, None]).to(dtype)


def weight_only_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same product in fp32 (in fp64 if `x` is), rounded once to the dtype of `x`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = (x.to(wide) @ weight.to(wide).T) * scale.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _weight_only_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride_token,
    weight_stride_out,
    SPLITS: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Writes the result; with splits, each split's unscaled sums `[SPLITS, num_tokens, out_features]` fp32 go to `out_ptr`."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    ins = tl.arange(0, INS)
    split_len = tl.cdiv(tl.cdiv(in_features, SPLIT_UNIT), SPLITS) * SPLIT_UNIT
    first = split * split_len
    last = tl.minimum(first + split_len, in_features)
    has_token = tokens < num_tokens
    has_out = outs < out_features
    # Rows past the last one repeat it and are never stored. So the loop needs no mask, and reads nothing out of bounds.
    rows = tl.minimum(outs, out_features - 1).to(tl.int64)
    weight_ptrs = weight_ptr + rows[:, None] * weight_stride_out + ins[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride_token + ins[None, :]
    acc = tl.zeros([TOKENS, OUTS], tl.float32)
    for start in range(first, last, INS):
        present = start + ins < last
        weight = tl.load(weight_ptrs + start, mask=present[None, :], other=0.0)
        x = tl.load(x_ptrs + start, mask=has_token[:, None] & present[None, :], other=0.0)
        acc = tl.dot(x, weight.to(x.dtype).T, acc)
    places = tokens.to(tl.int64)
    if SPLITS > 1:
        places += split.to(tl.int64) * num_tokens
    else:
        acc *= tl.load(scale_ptr + outs, mask=has_out, other=0.0)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + outs, mask=has_out, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + places[:, None] * out_features + outs[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_token[:, None] & has_out[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _add_splits_kernel(
    sums_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, out_features, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outs < out_features
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + (split * num_tokens + token) * out_features + outs, mask=mask, other=0.0)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + outs, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_features + outs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _dequantise_kernel(weight_ptr, scale_ptr, out_ptr, in_features, weight_stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ins = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ins < in_features
    weight = tl.load(weight_ptr + row * weight_stride_out + ins, mask=mask, other=0.0)
    wide = weight.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * in_features + ins, wide.to(out_ptr.dtype.element_ty), mask=mask)


def weight_only_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_splits: int
) -> torch.Tensor:
    """`x @ (weight * scale).T + bias`, without gradients.

    Args:
        x: `[num_tokens, in_features]` fp16/bf16, last stride 1, at most `MAX_ROWS` rows.
        weight: `[out_features, in_features]` int8 or e4m3, last stride 1.
        scale: `[out_features]` fp32, contiguous; may be 0.
        bias: `[out_features]` in the dtype of `x`, contiguous, or None. Added before the only rounding.
        num_splits: what `linear_splits` says for this matrix. Others are right, too, and may be slower.

    Returns:
        A new tensor `[num_tokens, out_features]` in the dtype of `x`. Scratch for the splits is taken from torch's allocator.

    Raises:
        ValueError: wrong shape, dtype or stride, too many rows, or no split.
    """
    check_weight(weight, scale)
    require_rows(x, weight.shape[1], len(weight), bias, num_splits)
    return multiply_tiles(_weight_only_linear_kernel, x, weight, (scale,), bias, num_splits, scale_of_sums=scale)


def multiply_tiles(
    kernel: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: tuple[torch.Tensor | None, ...],
    bias: torch.Tensor | None,
    num_splits: int,
    *sizes: int,
    scale_of_sums: torch.Tensor | None = None,
    most_ins: int = SPLIT_UNIT,
    **constants: int,
) -> torch.Tensor:
    """A product of checked arguments: launch `kernel` for every tile, and add the splits.

    Steps have at most `most_ins` inputs. `factors` are the kernel's scales, and zeros if it has any; a kernel that leaves scales to
    the sums of splits needs them as `scale_of_sums`, too.
    """
    num_tokens, out_features = len(x), len(weight)
    tile = tile_of(num_tokens)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    target = out
    if num_splits > 1:
        target = torch.empty((num_splits, num_tokens, out_features), dtype=torch.float32, device=x.device)
    # Tiles of tokens come first, so that programs that read the same part of the weight run side by side.
    kernel[(triton.cdiv(num_tokens, tile.tokens), triton.cdiv(out_features, tile.outs), num_splits)](
        x,
        weight,
        *factors,
        bias,
        target,
        num_tokens,
        out_features,
        weight.shape[1],
        *sizes,
        x.stride(0),
        weight.stride(0),
        SPLITS=num_splits,
        SPLIT_UNIT=SPLIT_UNIT,
        TOKENS=tile.tokens,
        OUTS=tile.outs,
        INS=min(tile.ins, most_ins),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )
    if num_splits > 1:
        add_splits(target, scale_of_sums, bias, out)
    return out


def add_splits(sums: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the sum of `sums` `[num_splits, num_tokens, out_features]`, times `scale`, plus `bias`, into `out`."""
    num_splits, num_tokens, out_features = sums.shape
    _add_splits_kernel[(num_tokens, triton.cdiv(out_features, _SUM_BLOCK))](
        sums, scale, bias, out, num_tokens, out_features, SPLITS=num_splits, BLOCK=_SUM_BLOCK, num_warps=4
    )


def dequantise_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight * scale` per output channel, rounded once.

    Args:
        weight: `[num_outs, in_features]` int8 or e4m3, last stride 1; a slab of rows of a matrix.
        scale: `[num_outs]` fp32, contiguous, of these rows.
        dtype: fp16 or bf16.

    Returns:
        A new tensor `[num_outs, in_features]` of `dtype`.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    check_weight(weight, scale)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    require_dtype("the result", out, *COMPUTE_DTYPES)
    num_outs, in_features = weight.shape
    _dequantise_kernel[(num_outs, triton.cdiv(in_features, DEQUANTISE_BLOCK))](
        weight, scale, out, in_features, weight.stride(0), BLOCK=DEQUANTISE_BLOCK, num_warps=4
    )
    return out


def require_rows(
    x: torch.Tensor, in_features: int, out_features: int, bias: torch.Tensor | None, num_splits: int
) -> None:
    """Raise ValueError unless `x`, `bias` and `num_splits` are as for `weight_only_linear`."""
    require_shape("x", x, ("num_tokens", in_features))
    require_dtype("x", x, *COMPUTE_DTYPES)
    require_unit_stride("x", x)
    if len(x) > MAX_ROWS:
        raise ValueError(f"x has {len(x)} rows, expected at most {MAX_ROWS}: multiply with dequantised slabs")
    if bias is not None:
        require_shape("bias", bias, (out_features,))
        require_dtype("bias", bias, x.dtype)
        require_unit_stride("bias", bias)
    if num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, expected at least 1")


def check_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise ValueError unless both are as for `weight_only_linear`."""
    require_shape("weight", weight, ("out_features", "in_features"))
    require_dtype("weight", weight, *_WEIGHT_DTYPES)
    require_unit_stride("weight", weight)
    require_shape("scale", scale, (weight.shape[0],))
    require_dtype("scale", scale, torch.float32)
    require_unit_stride("scale", scale)
