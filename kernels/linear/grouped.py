"""Products with the weights of experts: each row with the matrix of its expert, in one launch.

Routes are sorted by expert. A program multiplies a tile of one expert's rows with a tile of its weight. So an expert's weight is
read once for each tile of its rows, and not at all without rows. Only the device knows how many rows an expert has. The grid has as
many tiles as there can be, each program finds its expert, and programs past the last tile end at once. The host reads no value, so
a CUDA graph can hold it all. Rows are gathered and scattered by the kernel; nothing is permuted in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import (
    FLOAT_DTYPES,
    FP8_DTYPE,
    next_power_of_2,
    require_dtype,
    require_shape,
    require_unit_stride,
)
from kvrelay.kernels.linear.group_scaled import check_stored, meant_numbers, power_of_two
from kvrelay.kernels.linear.weight_only import COMPUTE_DTYPES

ROWS_PER_EXPERT = (1, 17, 65)
"""The fewest rows per expert, on average, for which each kernel is taken."""


@dataclass(frozen=True)
class Routes:
    """The rows of each expert. A token with `k` experts has `k` consecutive routes."""

    order: torch.Tensor  # [num_routes] int64, the routes sorted by expert
    starts: torch.Tensor  # [num_experts + 1] int32, start of each expert's routes in `order`
    rows_per_expert: int  # on average, rounded up; decides which kernel is taken

    @property
    def num_experts(self) -> int:
        """The experts of the layer, used or not."""
        return len(self.starts) - 1


def plan_routes(expert_ids: torch.Tensor, num_experts: int, rows_per_expert: int | None = None) -> Routes:
    """The routes of `expert_ids` `[num_tokens, k]`, each `0 <= id <= num_experts`.

    The id `num_experts` is no expert, and not computed. `rows_per_expert` chooses the kernel, so that each can be compiled with one
    route; None: the average of these routes.
    """
    ordered, order = expert_ids.flatten().sort(stable=True)
    firsts = torch.arange(num_experts + 1, dtype=ordered.dtype, device=ordered.device)
    if rows_per_expert is None:
        rows_per_expert = triton.cdiv(len(order), num_experts)
    return Routes(order, torch.searchsorted(ordered, firsts, out_int32=True), rows_per_expert)


@dataclass(frozen=True)
class _Tile:
    """The size of a program's result, and of its steps."""

    rows: int
    outs: int
    ins: int
    stages: int
    warps: int


def _tile(rows_per_expert: int, dtype: torch.dtype) -> _Tile:
    """The tile for the average number of rows per expert."""
    if dtype == torch.float32:  # exact products with operands twice as wide
        return _Tile(16, 64, 32, stages=2, warps=4)
    _, some, many = ROWS_PER_EXPERT
    if rows_per_expert < some:
        return _Tile(16, 64, 128, stages=4, warps=4)
    if rows_per_expert < many:
        return _Tile(64, 128, 64, stages=3, warps=4)
    return _Tile(128, 128, 64, stages=3, warps=8)


def grouped_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    num_experts: int,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same products one by one, in fp32 (in fp64 if `x` is), rounded once to the dtype of `x`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    experts, num_outs = expert_ids.flatten().tolist(), len(weight) // num_experts
    out = x.new_empty(len(experts), num_outs, dtype=wide)
    for route, expert in enumerate(experts):
        rows = slice(expert * num_outs, (expert + 1) * num_outs)
        product = weight[rows].to(wide) @ x[route * len(x) // len(experts)].to(wide)
        product = product if scale is None else product * scale[rows].to(wide)
        product = product if bias is None else product + bias[rows].to(wide)
        out[route] = product if factors is None else product * factors.flatten()[route].to(wide)
    return out.to(x.dtype)


@triton.jit
@no_type_check
def _by_inputs(of_groups, OUTS: tl.constexpr, INS: tl.constexpr, GROUPS: tl.constexpr):
    """Expand `[OUTS, GROUPS]` to the factors of a tile `[OUTS, INS]`."""
    if GROUPS > 1:
        of_groups = tl.reshape(tl.broadcast_to(of_groups[:, :, None], (OUTS, GROUPS, INS // GROUPS)), (OUTS, INS))
    return of_groups


@triton.jit(do_not_specialize=["routes_per_row"])
@no_type_check
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    factor_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_experts,
    out_features,
    num_columns,
    group_size,
    num_groups,
    routes_per_row,
    x_stride_row,
    weight_stride_out,
    EXPERTS: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    IS_E2M1: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    first = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    num_tiles = tl.cdiv(tl.load(starts_ptr + experts + 1, mask=is_expert, other=0) - first, ROWS)
    expert = tl.sum((tl.cumsum(num_tiles, 0) <= tile).to(tl.int32), 0)
    if expert < num_experts:
        start = tl.load(starts_ptr + expert) + (tile - tl.sum(tl.where(experts < expert, num_tiles, 0), 0)) * ROWS
        places = start + tl.arange(0, ROWS)
        has_route = places < tl.load(starts_ptr + expert + 1)
        # Places past the expert's last one multiply some row and store nothing, so the loop needs no mask.
        routes = tl.load(order_ptr + places, mask=has_route, other=0)
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        has_out = outs < out_features
        channels = expert.to(tl.int64) * out_features + tl.minimum(outs, out_features - 1)
        ins = tl.arange(0, INS)
        x_ptrs = x_ptr + (routes // routes_per_row)[:, None] * x_stride_row + ins[None, :]
        columns = tl.arange(0, INS // PER_COLUMN)
        weight_ptrs = weight_ptr + channels[:, None] * weight_stride_out + columns[None, :]
        acc = tl.zeros([ROWS, OUTS], tl.float32)
        # Counts columns of `weight`: the compiler would not know the alignment of half a feature's index.
        for column in range(0, num_columns, INS // PER_COLUMN):
            at = column * PER_COLUMN
            weight = tl.load(weight_ptrs + column, mask=(column + columns < num_columns)[None, :], other=0.0)
            x = tl.load(x_ptrs + at, mask=(at + ins < num_columns * PER_COLUMN)[None, :], other=0.0)
            if GROUPS > 0:
                weight = meant_numbers(weight, PER_COLUMN, IS_E2M1)
                groups = at // group_size + tl.arange(0, GROUPS)
                of_groups = channels[:, None] * num_groups + tl.minimum(groups, num_groups - 1)[None, :]
                if zero_ptr is not None:
                    weight -= _by_inputs(tl.load(zero_ptr + of_groups).to(tl.float32), OUTS, INS, GROUPS)
                scale = tl.load(scale_ptr + of_groups)
                scale = power_of_two(scale) if IS_E2M1 else scale.to(tl.float32)
                weight *= _by_inputs(scale, OUTS, INS, GROUPS)
            acc = tl.dot(x, weight.to(x.dtype).T, acc, input_precision="ieee")
        if scale_ptr is not None and GROUPS == 0:
            acc *= tl.load(scale_ptr + channels)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + channels).to(tl.float32)[None, :]
        if factor_ptr is not None:
            acc *= tl.load(factor_ptr + routes, mask=has_route, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + routes[:, None] * out_features + outs[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_route[:, None] & has_out[None, :])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    routes: Routes,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """`factor * (x @ (weight * scale).T + bias)`, each row with the weight, scale and bias of its expert.

    Args:
        x: `[num_rows, in_features]` fp32/fp16/bf16, last stride 1; `num_routes` is a multiple of `num_rows`: of four routes for two
            rows the first two are of the first row.
        weight: `[num_experts * out_features, in_features]`, one expert below the other, last stride 1; in the dtype of `x`, or int8
            or e4m3 beside 16-bit `x`.
        bias: `[num_experts * out_features]` in a float dtype, contiguous, or None.
        scale: `[num_experts * out_features]` fp32, contiguous, or None.
        factors: `num_routes` numbers of a float dtype, contiguous, or None: of each route's whole result.

    Returns:
        A new tensor `[num_routes, out_features]` in the dtype of `x`, in the routes' own order. Rows of nobody's routes are any.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    num_outs, in_features = len(weight), weight.shape[-1]
    require_dtype("x", x, *FLOAT_DTYPES)
    require_shape("weight", weight, (routes.num_experts * (num_outs // routes.num_experts), "in_features"))
    require_dtype("weight", weight, *((x.dtype,) if x.dtype == torch.float32 else (x.dtype, torch.int8, FP8_DTYPE)))
    require_unit_stride("weight", weight)
    if scale is not None:
        require_shape("scale", scale, (num_outs,))
        require_dtype("scale", scale, torch.float32)
        require_unit_stride("scale", scale)
    return _launch(x, _Matrix(weight, scale, None, in_features, 0), routes, bias, factors)


def grouped_stored_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    routes: Routes,
    *,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """`factor * (x @ ((values - zero) * scale).T + bias)`, each row with the weight and bias of its expert.

    Args:
        x: `[num_rows, in_features]` fp16/bf16; else as for `grouped_linear`.
        values: `[num_experts * out_features, in_features]` int8 or e4m3, or half as many columns of uint8; last stride 1. See
            `group_scaled_linear`.
        scale: `[num_experts * out_features, num_groups]` fp32, fp16 or bf16; contiguous. Or uint8, of exponents: then values are
            e2m1 and have no zeros (MXFP4).
        zero: like `scale`, uint8 or int8, or None for zeros.
        group_size: input features that share a scale, a multiple of `MIN_GROUP` unless there is one group.
        routes, bias, factors: as for `grouped_linear`.

    Returns:
        As `grouped_linear`.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    _, in_features = check_stored(values, scale, zero, group_size)
    require_dtype("x", x, *COMPUTE_DTYPES)
    return _launch(x, _Matrix(values, scale, zero, in_features, group_size), routes, bias, factors)


@dataclass(frozen=True)
class _Matrix:
    """The weights of all experts, in any form."""

    values: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    in_features: int
    group_size: int  # 0: one scale per channel, applied to the sums


def _launch(
    x: torch.Tensor, matrix: _Matrix, routes: Routes, bias: torch.Tensor | None, factors: torch.Tensor | None
) -> torch.Tensor:
    """The product, for a matrix that was checked. Raises ValueError for the other arguments."""
    values, scale, group_size = matrix.values, matrix.scale, matrix.group_size
    num_routes, out_features = len(routes.order), len(values) // routes.num_experts
    require_shape("x", x, ("num_rows", matrix.in_features))
    require_unit_stride("x", x)
    if len(values) % routes.num_experts:
        raise ValueError(f"the weight has {len(values)} rows, expected a multiple of {routes.num_experts} experts")
    if bias is not None:
        require_shape("bias", bias, (len(values),))
        require_dtype("bias", bias, *FLOAT_DTYPES)
        require_unit_stride("bias", bias)
    if factors is not None and (factors.numel() != num_routes or not factors.is_contiguous()):
        raise ValueError(f"factors has shape {tuple(factors.shape)}, expected {num_routes} contiguous numbers")
    if num_routes % max(1, len(x)):
        raise ValueError(f"x has {len(x)} rows, expected a divisor of {num_routes} routes")
    if factors is not None:
        factors = factors.float()  # one kernel for all their types
    out = torch.empty((num_routes, out_features), dtype=x.dtype, device=x.device)
    if not num_routes:
        return out
    tile = _tile(routes.rows_per_expert, x.dtype)
    ins, groups = tile.ins, 0
    if group_size:
        assert scale is not None, "groups without scales"
        ins, groups = _step(tile.ins, group_size, scale.shape[1])
    num_tiles = num_routes // tile.rows + min(routes.num_experts, num_routes)
    # Tiles of rows come first, so that programs that read the same part of a weight run side by side.
    _grouped_linear_kernel[(num_tiles, triton.cdiv(out_features, tile.outs))](
        x,
        values,
        scale,
        matrix.zero,
        bias,
        factors,
        routes.order,
        routes.starts,
        out,
        routes.num_experts,
        out_features,
        values.shape[1],
        group_size,
        scale.shape[1] if group_size and scale is not None else 0,
        num_routes // len(x),
        x.stride(0),
        values.stride(0),
        EXPERTS=next_power_of_2(routes.num_experts),
        PER_COLUMN=matrix.in_features // values.shape[1],
        IS_E2M1=groups > 0 and scale is not None and scale.dtype == torch.uint8,
        GROUPS=groups,
        ROWS=tile.rows,
        OUTS=tile.outs,
        INS=ins,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _step(ins: int, group_size: int, num_groups: int) -> tuple[int, int]:
    """(inputs of one step of the loop, at most ``ins``; number of groups that they belong to): whole groups, or a part of one."""
    within = group_size & -group_size
    if num_groups == 1 or within >= ins:
        return ins, 1
    return (ins, ins // group_size) if within == group_size else (within, 1)
