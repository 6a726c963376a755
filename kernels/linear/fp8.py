"""Products of fp8 with fp8 (e4m3): `x @ (weight * scale).T`, where the rows of `x` are rounded, too.

There are two launches. `round_rows` rounds each row, or each group of a row's inputs, to e4m3 with its own scale, or with a given
one. `fp8_linear` multiplies such rows with a weight as a checkpoint stores it, on tensor cores that take fp8 on both sides: at
twice the rate of 16 bits, with sums in fp32. Scales are applied to the sums: once, or for each group of inputs.

Every number of rows goes this way, so that a token's K/V do not depend on how many were computed with it. Up to
`weight_only.MAX_ROWS` rows are bound by the bytes of the weight, and use splits as `weight_only_linear` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FP8_DTYPE, next_power_of_2, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.linear.weight_only import COMPUTE_DTYPES, ROW_TILES, SPLIT_UNIT, Tile, add_splits

MIN_GROUP = 32  # group sizes are multiples of this: one instruction multiplies so many

_MAX = tl.constexpr(448.0)  # the largest number of e4m3
_MIN_SCALE = tl.constexpr(1e-30)  # for a row of zeros
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROUND_BLOCK = 1024


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of activations in e4m3: `values * scale`."""

    values: torch.Tensor  # [num_rows, in_features] e4m3, contiguous
    scale: torch.Tensor  # [num_rows, num_groups] fp32, contiguous
    group_size: int  # inputs that share a scale
    dtype: torch.dtype  # dtype before rounding: fp16 or bf16


def fp8_tile(num_rows: int, *, by_groups: bool) -> Tile:
    """The tile by number of rows, like `weight_only.tile_of`; a step has half the bytes. Sums of groups take extra registers."""
    if num_rows <= ROW_TILES[0]:
        return Tile(16, 64, 128, stages=5, warps=4)
    if num_rows <= ROW_TILES[1]:
        return Tile(32, 128, 128, stages=3, warps=4)
    if by_groups:
        return Tile(64, 128, 128, stages=4, warps=4)
    if num_rows <= ROW_TILES[2]:
        return Tile(64, 128, 128, stages=3, warps=8)
    return Tile(128, 128, 128, stages=3, warps=8)


def round_rows_reference(x: torch.Tensor, group_size: int, scale: float | None) -> Fp8Rows:
    """Each group's largest number becomes the largest of e4m3. With a given `scale`, larger numbers are clipped."""
    num_rows, in_features = x.shape
    num_groups = -(-in_features // group_size)
    padded = torch.zeros(num_rows, num_groups * group_size, device=x.device)
    padded[:, :in_features] = x
    groups = padded.view(num_rows, num_groups, group_size)
    if scale is None:
        # With a Python number, a GPU would multiply by the reciprocal.
        scales = (groups.abs().amax(dim=2) / torch.full((), _MAX.value, device=x.device)).clamp(min=_MIN_SCALE.value)
    else:
        scales = torch.full((num_rows, num_groups), scale, device=x.device)
    values = (groups / scales[:, :, None]).clamp(-_MAX.value, _MAX.value).to(FP8_DTYPE)
    return Fp8Rows(values.flatten(1)[:, :in_features].contiguous(), scales, group_size, x.dtype)


def fp8_linear_reference(
    rows: Fp8Rows, values: torch.Tensor, scale: torch.Tensor, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same product in fp64, not rounded."""
    of_inputs = torch.arange(values.shape[1], device=values.device)
    x = rows.values.double() * rows.scale.double()[:, of_inputs // rows.group_size]
    weight = values.double() * scale.double()[:, of_inputs // group_size]
    product = x @ weight.T
    return product if bias is None else product + bias.double()


@triton.jit
@no_type_check
def _round_rows_kernel(
    x_ptr, values_ptr, scale_ptr, given_scale, in_features, group_size, num_groups, x_stride_row, BLOCK: tl.constexpr
):
    """One program rounds one group of a row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * group_size
    last = tl.minimum(first + group_size, in_features)
    offsets = tl.arange(0, BLOCK)
    if given_scale is None:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(first, last, BLOCK):
            x = tl.load(x_ptr + row * x_stride_row + start + offsets, mask=start + offsets < last, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        scale = tl.maximum(tl.div_rn(tl.max(largest, 0), _MAX), _MIN_SCALE)
    else:
        scale = given_scale
    tl.store(scale_ptr + row * num_groups + group, scale)
    for start in range(first, last, BLOCK):
        mask = start + offsets < last
        x = tl.load(x_ptr + row * x_stride_row + start + offsets, mask=mask, other=0.0).to(tl.float32)
        # NaN stays NaN: a broken row must not look intact.
        scaled = tl.clamp(tl.div_rn(x, tl.broadcast_to(scale, [BLOCK])), -_MAX, _MAX, tl.PropagateNan.ALL)
        tl.store(values_ptr + row * in_features + start + offsets, scaled.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def _fp8_linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    in_features,
    x_group_size,
    x_num_groups,
    group_size,
    num_groups,
    weight_stride_out,
    BY_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Writes the result; with splits, each split's scaled sums `[SPLITS, num_rows, out_features]` fp32 go to `out_ptr`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    ins = tl.arange(0, INS)
    split_len = tl.cdiv(tl.cdiv(in_features, SPLIT_UNIT), SPLITS) * SPLIT_UNIT
    first = split * split_len
    last = tl.minimum(first + split_len, in_features)
    has_row = rows < num_rows
    has_out = outs < out_features
    # Rows past the last one repeat it and are never stored. So the loop needs no mask, and reads nothing out of bounds.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    channels = tl.minimum(outs, out_features - 1).to(tl.int64)
    x_ptrs = x_ptr + x_rows[:, None] * in_features + ins[None, :]
    weight_ptrs = weight_ptr + channels[:, None] * weight_stride_out + ins[None, :]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(first, last, INS):
        present = (start + ins < last)[None, :]
        x = tl.load(x_ptrs + start, mask=present, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=present, other=0.0)
        if BY_GROUPS:
            x_scale = tl.load(x_scale_ptr + x_rows * x_num_groups + start // x_group_size)
            scale = tl.load(scale_ptr + channels * num_groups + start // group_size).to(tl.float32)
            acc += tl.dot(x, weight.T) * x_scale[:, None] * scale[None, :]
        else:
            # Hopper's fp8 instructions keep 14 bits of a sum, so each step's sum is added in fp32.
            acc = tl.dot(x, weight.T, acc, max_num_imprecise_acc=INS)
    if not BY_GROUPS:
        acc *= tl.load(x_scale_ptr + x_rows)[:, None]
        acc *= tl.load(scale_ptr + channels).to(tl.float32)[None, :]
    places = rows.to(tl.int64)
    if SPLITS > 1:
        places += split.to(tl.int64) * num_rows
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + channels).to(tl.float32)[None, :]
    out_ptrs = out_ptr + places[:, None] * out_features + outs[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_out[None, :])


def round_rows(x: torch.Tensor, group_size: int, scale: float | None) -> Fp8Rows:
    """Rows of activations in e4m3.

    Args:
        x: `[num_rows, in_features]` fp16/bf16, last stride 1.
        group_size: inputs of a row that share a scale, a multiple of `MIN_GROUP` unless there is one group.
        scale: of all rows, above 0; None: of each group the one that its largest number asks for.

    Raises:
        ValueError: wrong shape, dtype, stride, group or scale.
    """
    require_shape("x", x, ("num_rows", "in_features"))
    require_dtype("x", x, *COMPUTE_DTYPES)
    require_unit_stride("x", x)
    num_rows, in_features = x.shape
    num_groups = _num_groups("x's group_size", group_size, in_features)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale is {scale}, expected None or a number above 0")
    values = torch.empty((num_rows, in_features), dtype=FP8_DTYPE, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    block = min(_ROUND_BLOCK, next_power_of_2(min(group_size, in_features)))
    _round_rows_kernel[(num_rows, num_groups)](
        x,
        values,
        scales,
        scale,
        in_features,
        group_size,
        num_groups,
        x.stride(0),
        BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )
    return Fp8Rows(values, scales, group_size, x.dtype)


def fp8_linear(
    rows: Fp8Rows,
    values: torch.Tensor,
    scale: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    """`(rows.values * rows.scale) @ (values * scale).T + bias`, without gradients.

    Args:
        rows: what `round_rows` makes; any number of them.
        values: `[out_features, in_features]` e4m3, last stride 1.
        scale: `[out_features, num_groups]` fp32, fp16 or bf16; contiguous.
        group_size: input features that share a scale, a multiple of `MIN_GROUP` unless there is one group. Groups of rows and of
            the weight need not be of one size.
        bias: `[out_features]` in the dtype of `rows`, contiguous, or None. Added before the only rounding of the sums.
        num_splits: what `linear_splits` says for this matrix, 1 for many rows. Others are right, too, and may be slower.

    Returns:
        A new tensor `[num_rows, out_features]` in the dtype of `rows`. Scratch for the splits is taken from torch's allocator.

    Raises:
        ValueError: wrong shape, dtype, stride or group, or no split.
    """
    num_rows, in_features = rows.values.shape
    require_shape("values", values, ("out_features", in_features))
    require_dtype("values", values, FP8_DTYPE)
    require_unit_stride("values", values)
    out_features = values.shape[0]
    num_groups = _num_groups("group_size", group_size, in_features)
    require_shape("scale", scale, (out_features, num_groups))
    require_dtype("scale", scale, *_SCALE_DTYPES)
    if not scale.is_contiguous():
        raise ValueError("scale is not contiguous")
    if bias is not None:
        require_shape("bias", bias, (out_features,))
        require_dtype("bias", bias, rows.dtype)
        require_unit_stride("bias", bias)
    if num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, expected at least 1")
    x_num_groups = rows.scale.shape[1]
    by_groups = [size for size, count in ((rows.group_size, x_num_groups), (group_size, num_groups)) if count > 1]
    tile = fp8_tile(num_rows, by_groups=bool(by_groups))
    out = torch.empty((num_rows, out_features), dtype=rows.dtype, device=values.device)
    target = out
    if num_splits > 1:
        target = torch.empty((num_splits, num_rows, out_features), dtype=torch.float32, device=values.device)
    grid = (triton.cdiv(num_rows, tile.tokens), triton.cdiv(out_features, tile.outs), num_splits)
    _fp8_linear_kernel[grid](
        rows.values,
        rows.scale,
        values,
        scale,
        bias,
        target,
        num_rows,
        out_features,
        in_features,
        rows.group_size,
        x_num_groups,
        group_size,
        num_groups,
        values.stride(0),
        BY_GROUPS=bool(by_groups),
        SPLITS=num_splits,
        SPLIT_UNIT=SPLIT_UNIT,
        ROWS=tile.tokens,
        OUTS=tile.outs,
        INS=min(tile.ins, *(size & -size for size in by_groups), SPLIT_UNIT),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if num_splits > 1:
        add_splits(target, None, bias, out)
    return out


def _num_groups(name: str, group_size: int, in_features: int) -> int:
    """The number of groups. Raises ValueError."""
    num_groups = -(-in_features // group_size)
    if num_groups > 1 and group_size % MIN_GROUP:
        raise ValueError(f"{name} is {group_size}, expected a multiple of {MIN_GROUP}")
    return num_groups
