"""Products with weights that are scaled in groups of input features: `x @ ((values - zero) * scale).T`.

Weights are e4m3, int8, or two 4-bit numbers per byte, as quantised checkpoints store them. Each tile of the weight is converted to
the dtype of `x`, rounded once from fp32, and multiplied by the tensor cores with sums in fp32. The numbers are those of a matrix
that was dequantised before. One step of the loop stays within a group, so that it needs one scale per output; groups of 64 and 32
make short steps. Tiles, splits and the way for many rows are those of `weight_only_linear`.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FP8_DTYPE, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.linear.weight_only import (
    COMPUTE_DTYPES,
    DEQUANTISE_BLOCK,
    SPLIT_UNIT,
    multiply_tiles,
    require_rows,
)

VALUE_DTYPES = (torch.uint8, torch.int8, FP8_DTYPE)
"""The dtypes of stored values; uint8 holds two 4-bit numbers, the first in the low half."""
MIN_GROUP = 32  # group sizes are multiples of this, unless there is only one group

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dequantise_groups_reference(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """`(values - zero) * scale`, in fp32 and rounded once to `dtype`.

    A scale in uint8 is an exponent (e8m0), whose values are e2m1: MXFP4.
    """
    if values.dtype == torch.uint8:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    groups = torch.arange(values.shape[1], device=values.device) // group_size
    wide = values.to(torch.float32)
    if scale.dtype == torch.uint8:
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
        wide = magnitudes[(values & 7).int()] * torch.where(values < 8, 1.0, -1.0)
        scale = torch.exp2(scale.double() - 127)
    if zero is not None:
        wide = wide - zero.to(torch.float32)[:, groups]
    return (wide * scale.to(torch.float32)[:, groups]).to(dtype)


@triton.jit
@no_type_check
def meant_numbers(values, PER_COLUMN: tl.constexpr, IS_E2M1: tl.constexpr):
    """`[n, m]` stored values as `[n, m * PER_COLUMN]` numbers in fp32."""
    if PER_COLUMN == 2:
        values = tl.interleave(values & 15, values >> 4)
    if IS_E2M1:
        # Moves exponent and mantissa to their places in fp16, whose bias is larger by 14. Subnormals of e2m1 become
        # subnormals of fp16.
        bits = (values & 7).to(tl.uint16) << 9 | (values & 8).to(tl.uint16) << 12
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return values.to(tl.float32)


@triton.jit
@no_type_check
def power_of_two(exponent):
    """e8m0 in uint8 as fp32: `2 ** (exponent - 127)`. The least one, below 1e-38, becomes 0."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _group_scaled_linear_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    num_columns,
    group_size,
    num_groups,
    x_stride_token,
    values_stride_out,
    PER_COLUMN: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Writes the result; with splits, each split's sums `[SPLITS, num_tokens, out_features]` fp32 go to `out_ptr`."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    ins, columns = tl.arange(0, INS), tl.arange(0, INS // PER_COLUMN)
    # Counts columns of `values`: the compiler would not know the alignment of half a feature's index.
    split_len = tl.cdiv(tl.cdiv(num_columns, SPLIT_UNIT // PER_COLUMN), SPLITS) * (SPLIT_UNIT // PER_COLUMN)
    first = split * split_len
    last = tl.minimum(first + split_len, num_columns)
    has_token = tokens < num_tokens
    has_out = outs < out_features
    # Rows past the last one repeat it and are never stored. So the loop needs no mask, and reads nothing out of bounds.
    rows = tl.minimum(outs, out_features - 1).to(tl.int64)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride_token + ins[None, :]
    values_ptrs = values_ptr + rows[:, None] * values_stride_out + columns[None, :]
    acc = tl.zeros([TOKENS, OUTS], tl.float32)
    for column in range(first, last, INS // PER_COLUMN):
        start = column * PER_COLUMN
        present = start + ins < last * PER_COLUMN
        x = tl.load(x_ptrs + start, mask=has_token[:, None] & present[None, :], other=0.0)
        weight = tl.load(values_ptrs + column, mask=(column + columns < last)[None, :], other=0.0)
        weight = meant_numbers(weight, PER_COLUMN, False)
        places = rows * num_groups + start // group_size
        if zero_ptr is not None:
            weight -= tl.load(zero_ptr + places).to(tl.float32)[:, None]
        weight *= tl.load(scale_ptr + places).to(tl.float32)[:, None]
        acc = tl.dot(x, weight.to(x.dtype).T, acc)
    places = tokens.to(tl.int64)
    if SPLITS > 1:
        places += split.to(tl.int64) * num_tokens
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=has_out, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + places[:, None] * out_features + outs[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_token[:, None] & has_out[None, :])


@triton.jit
@no_type_check
def _dequantise_groups_kernel(
    values_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    in_features,
    group_size,
    values_stride_out,
    num_groups,
    PER_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ins = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ins < in_features
    columns = tl.program_id(1) * (BLOCK // PER_COLUMN) + tl.arange(0, BLOCK // PER_COLUMN)
    wide = tl.load(values_ptr + row * values_stride_out + columns, mask=columns < in_features // PER_COLUMN, other=0.0)
    wide = meant_numbers(wide, PER_COLUMN, False)
    places = row * num_groups + ins // group_size
    if zero_ptr is not None:
        wide -= tl.load(zero_ptr + places, mask=mask, other=0.0).to(tl.float32)
    wide *= tl.load(scale_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * in_features + ins, wide.to(out_ptr.dtype.element_ty), mask=mask)


def group_scaled_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    """`x @ ((values - zero) * scale).T + bias`, without gradients.

    Args:
        x: `[num_tokens, in_features]` fp16/bf16, last stride 1, at most `MAX_ROWS` rows.
        values: `[out_features, in_features]` int8 or e4m3, or `[out_features, in_features / 2]` uint8; last stride 1.
        scale: `[out_features, num_groups]` fp32, fp16 or bf16; contiguous.
        zero: like `scale`, uint8 or int8, or None for zeros.
        group_size: input features that share a scale, a multiple of `MIN_GROUP` unless there is one group.
        bias: `[out_features]` in the dtype of `x`, contiguous, or None. Added before the only rounding of the sums.
        num_splits: what `linear_splits` says for this matrix. Others are right, too, and may be slower.

    Returns:
        A new tensor `[num_tokens, out_features]` in the dtype of `x`. Scratch for the splits is taken from torch's allocator.

    Raises:
        ValueError: wrong shape, dtype or stride, too many rows, or no split.
    """
    out_features, in_features = check_integers(values, scale, zero, group_size)
    require_rows(x, in_features, out_features, bias, num_splits)
    num_groups = scale.shape[1]
    return multiply_tiles(
        _group_scaled_linear_kernel,
        *(x, values, (scale, zero), bias, num_splits, group_size, num_groups),
        most_ins=SPLIT_UNIT if num_groups == 1 else group_size & -group_size,
        PER_COLUMN=in_features // values.shape[1],
    )


def dequantise_groups(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """`(values - zero) * scale`, rounded once; for `values`, `scale` and `zero` see `group_scaled_linear`.

    Args:
        dtype: fp16 or bf16.

    Returns:
        A new tensor `[out_features, in_features]` of `dtype`.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    out_features, in_features = check_integers(values, scale, zero, group_size)
    out = torch.empty((out_features, in_features), dtype=dtype, device=values.device)
    require_dtype("the result", out, *COMPUTE_DTYPES)
    _dequantise_groups_kernel[(out_features, triton.cdiv(in_features, DEQUANTISE_BLOCK))](
        values,
        scale,
        zero,
        out,
        in_features,
        group_size,
        values.stride(0),
        scale.shape[1],
        PER_COLUMN=in_features // values.shape[1],
        BLOCK=DEQUANTISE_BLOCK,
        num_warps=4,
    )
    return out


def check_integers(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int
) -> tuple[int, int]:
    """Like `check_stored`, for weights other than MXFP4."""
    require_dtype("scale", scale, *_SCALE_DTYPES)
    return check_stored(values, scale, zero, group_size)


def check_stored(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int
) -> tuple[int, int]:
    """Check a stored weight. Returns (outputs, input features). Raises ValueError."""
    require_shape("values", values, ("out_features", "in_features"))
    require_dtype("values", values, *VALUE_DTYPES)
    require_unit_stride("values", values)
    out_features, num_columns = values.shape
    in_features = 2 * num_columns if values.dtype == torch.uint8 else num_columns
    num_groups = triton.cdiv(in_features, group_size)
    if num_groups > 1 and group_size % MIN_GROUP:
        raise ValueError(f"group_size is {group_size}, expected a multiple of {MIN_GROUP}")
    may_be_mxfp4 = values.dtype == torch.uint8 and zero is None
    scale_dtypes = (*_SCALE_DTYPES, torch.uint8) if may_be_mxfp4 else _SCALE_DTYPES
    for name, tensor, dtypes in (("scale", scale, scale_dtypes), ("zero", zero, (torch.uint8, torch.int8))):
        if tensor is not None:
            require_shape(name, tensor, (out_features, num_groups))
            require_dtype(name, tensor, *dtypes)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
    return out_features, in_features
