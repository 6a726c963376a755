"""A layer of experts for a few tokens, without tensor cores and without sorting: what one stream's decode step consists of.

Such a layer is bound by the bytes of the experts that are read, and then by launches. Here it is two launches. The first multiplies
a token with gate and up of one of its experts and applies the activation: a program for each route and few outputs. The second
multiplies with down, and adds a token's experts in the same program, in a fixed order: no atomics, and equal calls give equal bits.

A warp reads a row 16 bytes a lane. A lane multiplies its pieces of each row with the same pieces of `x`, and adds the products in
fp32. Lanes are added at the end. Sums are rounded where `grouped_linear`, the activation's kernel and torch's sum round.

Two routes to one expert read it twice, the second time from the cache. So this is for fewer routes than experts, and not for
weights in groups, which `grouped_stored_linear` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.linear.grouped import grouped_linear_reference
from kvrelay.kernels.linear.vector import PIECE_BYTES, finished, widened

MAX_FEW_ROUTES = 64  # with 128 of 128 experts, sorting is as fast on an H200
TOP_KS = (1, 5)
"""For each kernel of the second product, the number of a token's experts to compile it with."""

# The tiles of both products, as measured on an H200. A step's loads are not ahead of it: they go to registers.
_WARP = 32
_WARPS = 4
_GATE_UP_WIDTH = 2  # warps of the first product beside each other along the inputs; others have other rows
_OUTS = 4  # results of a program: pairs of rows of gate and up, or rows of down of each of a token's experts
_MAX_ROUTES = 8  # of a token in one step of the second product


def are_few_routes(num_routes: int, num_experts: int) -> bool:
    """Whether these kernels are meant for so many routes."""
    return num_routes <= min(MAX_FEW_ROUTES, num_experts)


@dataclass(frozen=True)
class Gate:
    """An activation that the first launch applies: `silu_mul`, or `clamped_swiglu` if there is a limit."""

    alpha: float = 1.0
    limit: float | None = None


@dataclass(frozen=True)
class ExpertMatrix:
    """One of the matrices of all experts, one expert below the other."""

    values: torch.Tensor  # [num_experts * out_features, in_features], last stride 1; in the dtype of x, or int8 or e4m3
    scale: torch.Tensor | None  # [num_experts * out_features] fp32, contiguous
    bias: torch.Tensor | None  # [num_experts * out_features] in a float dtype, contiguous


def few_down_reference(
    x: torch.Tensor, matrix: ExpertMatrix, expert_ids: torch.Tensor, factors: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """`few_down` in float64, without any rounding. With one token's factor 1 for an expert it is a row of `few_gate_up`, too."""
    is_none = expert_ids == num_experts  # such rows may be NaN
    rows, ids = x.double().masked_fill(is_none.view(-1, 1), 0), expert_ids.masked_fill(is_none, 0)
    given = {"bias": matrix.bias, "scale": matrix.scale, "factors": factors.double().masked_fill(is_none, 0)}
    products = grouped_linear_reference(rows, matrix.values, ids, num_experts, **given)
    return products.view(*ids.shape, -1).sum(dim=1)


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=["ids_ptr"])
@no_type_check
def _few_gate_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    num_experts,
    out_features,
    in_features,
    top_k,
    x_stride_row,
    weight_stride_out,
    alpha,
    limit,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    OUTS: tl.constexpr,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """`out_features` is the number of results: half of an expert's rows if they are gated."""
    route = tl.program_id(0)
    expert = tl.load(ids_ptr + route)
    if expert < num_experts:
        INS: tl.constexpr = LANES * PIECE
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        has_out = outs < out_features
        # Outputs past the last one repeat it and are never stored.
        rows = expert * (out_features * (1 + IS_GATED)) + tl.minimum(outs, out_features - 1)
        ins = tl.arange(0, INS)
        x_ptrs = x_ptr + (route // top_k).to(tl.int64) * x_stride_row + ins[None, :]
        gate_ptrs = weight_ptr + rows[:, None] * weight_stride_out + ins[None, :]
        up_ptrs = weight_ptr + (rows + out_features)[:, None] * weight_stride_out + ins[None, :]
        gate_sums, up_sums = tl.zeros([OUTS, LANES], tl.float32), tl.zeros([OUTS, LANES], tl.float32)
        for start in tl.range(0, in_features, INS, num_stages=1):
            present = (start + ins < in_features)[None, :]
            # Loaded before the weight: so the compiler moves x between lanes, and leaves the weight where it was loaded.
            x = tl.load(x_ptrs + start, mask=present, other=0.0).to(tl.float32)
            gate_weight = tl.load(gate_ptrs + start, mask=present, other=0.0)
            if IS_GATED:
                up_weight = tl.load(up_ptrs + start, mask=present, other=0.0)
            gate_sums += tl.sum(tl.reshape(widened(gate_weight) * x, (OUTS, LANES, PIECE)), 2)
            if IS_GATED:
                up_sums += tl.sum(tl.reshape(widened(up_weight) * x, (OUTS, LANES, PIECE)), 2)
        dtype = out_ptr.dtype.element_ty
        out = finished(tl.sum(gate_sums, 1), rows, has_out, scale_ptr, bias_ptr)
        if IS_GATED:
            up = finished(tl.sum(up_sums, 1), rows + out_features, has_out, scale_ptr, bias_ptr)
            # Rounded as if they were stored before the activation.
            gate, up = out.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            if IS_CLAMPED:
                gate = tl.where(gate > limit, limit, gate)
                up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
                out = (up + 1) * gate * tl.sigmoid(gate * alpha)
            else:
                out = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
        tl.store(out_ptr + route.to(tl.int64) * out_features + outs, out.to(dtype), mask=has_out)


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=["ids_ptr", "factor_ptr"])
@no_type_check
def _few_down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    num_experts,
    out_features,
    in_features,
    top_k,
    x_stride_row,
    weight_stride_out,
    factor_ptr,
    ROUTES: tl.constexpr,
    OUTS: tl.constexpr,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A tile is `OUTS` outputs of `ROUTES` experts."""
    INS: tl.constexpr = LANES * PIECE
    token = tl.program_id(0)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    ins = tl.arange(0, INS)
    out = tl.zeros([OUTS], tl.float32)
    for first in range(0, top_k, ROUTES):
        places = first + tl.arange(0, ROUTES)
        routes = token.to(tl.int64) * top_k + places
        experts = tl.load(ids_ptr + routes, mask=places < top_k, other=num_experts)
        # Nobody wrote the inputs of routes to no expert.
        is_ours = experts < num_experts
        is_row = is_ours[None, :] & (outs < out_features)[:, None]
        rows = experts[None, :] * out_features + outs[:, None]
        # Loaded for each output again, from the cache: so x is in the lanes that have the weight, whatever Triton lays out.
        x_places = routes[None, :, None] * x_stride_row + ins[None, None, :]
        x_ptrs = x_ptr + tl.broadcast_to(x_places, (OUTS, ROUTES, INS))
        weight_ptrs = weight_ptr + rows[:, :, None] * weight_stride_out + ins[None, None, :]
        acc = tl.zeros([OUTS, ROUTES, LANES], tl.float32)
        for start in tl.range(0, in_features, INS, num_stages=1):
            present = is_row[:, :, None] & (start + ins < in_features)[None, None, :]
            x = tl.load(x_ptrs + start, mask=present, other=0.0).to(tl.float32)  # first, as in the first product
            weight = tl.load(weight_ptrs + start, mask=present, other=0.0)
            acc += tl.sum(tl.reshape(widened(weight) * x, (OUTS, ROUTES, LANES, PIECE)), 3)
        total = finished(tl.sum(acc, 2), rows, is_row, scale_ptr, bias_ptr)
        total *= tl.load(factor_ptr + routes, mask=is_ours, other=0.0)[None, :]
        # Rounded as if each expert's output were stored before the sum.
        out += tl.sum(total.to(out_ptr.dtype.element_ty).to(tl.float32), 1)
    out_ptrs = out_ptr + token.to(tl.int64) * out_features + outs
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=outs < out_features)


def few_gate_up(
    x: torch.Tensor, matrix: ExpertMatrix, expert_ids: torch.Tensor, num_experts: int, gate: Gate | None
) -> torch.Tensor:
    """`x @ (values * scale).T + bias` with the matrix of each of a row's experts, and the activation of that.

    Args:
        x: `[num_tokens, in_features]` fp32/fp16/bf16, last stride 1.
        matrix: `out_features` is even if there is a gate: gate above up. Beside fp32 it is fp32.
        expert_ids: `[num_tokens, top_k]` int64, contiguous, each `0 <= id <= num_experts`. The id `num_experts` is no expert.
        num_experts: the experts of the layer, used or not.
        gate: the activation, or None for the products themselves.

    Returns:
        A new tensor `[num_tokens * top_k, out_features]`, or half as wide with a gate, in the dtype of `x`. Rows of no expert are
        any.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    out_features = _check(x, matrix, expert_ids, num_experts)
    num_tokens, top_k = expert_ids.shape
    require_shape("x", x, (num_tokens, matrix.values.shape[1]))
    if gate is not None:
        if out_features % 2:
            raise ValueError(f"an expert has {out_features} rows of gate and up, expected an even number")
        out_features //= 2
    out = torch.empty((num_tokens * top_k, out_features), dtype=x.dtype, device=x.device)
    limit = None if gate is None else gate.limit
    return _launch(
        _few_gate_up_kernel,
        *(x, matrix, expert_ids, out, num_experts),
        1.0 if gate is None else gate.alpha,
        0.0 if limit is None else limit,
        IS_GATED=gate is not None,
        IS_CLAMPED=limit is not None,
        LANES=_WARP * _GATE_UP_WIDTH,
        num_warps=_WARPS,
    )


def few_down(
    x: torch.Tensor, matrix: ExpertMatrix, expert_ids: torch.Tensor, factors: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """The sum of each token's `factor * (x @ (values * scale).T + bias)`, over its experts.

    Args:
        x: `[num_tokens * top_k, in_features]`, what `few_gate_up` gives, or what an activation makes of that; last stride 1. Rows
            of no expert are not read.
        matrix, expert_ids, num_experts: as for `few_gate_up`.
        factors: `[num_tokens, top_k]` in a float dtype, contiguous.

    Returns:
        A new tensor `[num_tokens, out_features]` in the dtype of `x`. A token without experts has zeros.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    out_features = _check(x, matrix, expert_ids, num_experts)
    num_tokens, top_k = expert_ids.shape
    require_shape("x", x, (num_tokens * top_k, matrix.values.shape[1]))
    require_shape("factors", factors, (num_tokens, top_k))
    if not factors.is_contiguous():
        raise ValueError(f"factors has strides {factors.stride()}, expected a contiguous tensor")
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    # Half as many experts take half as many warps.
    parts = 1 if top_k > _MAX_ROUTES // 2 else 2
    factors = factors.float()  # one kernel for all their types
    return _launch(
        _few_down_kernel,
        *(x, matrix, expert_ids, out, num_experts, factors),
        ROUTES=_MAX_ROUTES // parts,
        LANES=_WARP,
        num_warps=_WARPS // parts,
    )


def _launch(
    kernel: Any,
    x: torch.Tensor,
    matrix: ExpertMatrix,
    expert_ids: torch.Tensor,
    out: torch.Tensor,
    num_experts: int,
    *others: torch.Tensor | float,
    **constants: int,
) -> torch.Tensor:
    """Launch programs for each row of `out`, and return it."""
    num_rows, out_features = out.shape
    if num_rows:
        # Rows come first, so that routes to one expert run side by side and read it from memory once.
        kernel[(num_rows, triton.cdiv(out_features, _OUTS))](
            x,
            matrix.values,
            matrix.scale,
            matrix.bias,
            expert_ids,
            out,
            num_experts,
            out_features,
            x.shape[1],
            expert_ids.shape[1],
            x.stride(0),
            matrix.values.stride(0),
            *others,
            OUTS=_OUTS,
            PIECE=PIECE_BYTES // matrix.values.element_size(),
            **constants,
        )
    return out


def _check(x: torch.Tensor, matrix: ExpertMatrix, expert_ids: torch.Tensor, num_experts: int) -> int:
    """The rows of an expert. Raises ValueError for what both products have in common."""
    num_rows = len(matrix.values)
    require_dtype("x", x, *FLOAT_DTYPES)
    require_unit_stride("x", x)
    require_shape("values", matrix.values, ("num_experts * out_features", "in_features"))
    is_wide = x.dtype == torch.float32
    require_dtype("values", matrix.values, *((x.dtype,) if is_wide else (x.dtype, torch.int8, FP8_DTYPE)))
    require_unit_stride("values", matrix.values)
    if num_rows % num_experts:
        raise ValueError(f"values has {num_rows} rows, expected a multiple of {num_experts} experts")
    for name, tensor, dtypes in (("scale", matrix.scale, (torch.float32,)), ("bias", matrix.bias, FLOAT_DTYPES)):
        if tensor is not None:
            require_shape(name, tensor, (num_rows,))
            require_dtype(name, tensor, *dtypes)
            require_unit_stride(name, tensor)
    require_shape("expert_ids", expert_ids, ("num_tokens", "top_k"))
    require_dtype("expert_ids", expert_ids, torch.int64)
    if not expert_ids.is_contiguous():
        raise ValueError(f"expert_ids has strides {expert_ids.stride()}, expected a contiguous tensor")
    return num_rows // num_experts
