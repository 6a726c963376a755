"""RMSNorm over the last dimension, alone or fused with the residual addition.

For the layer norms (`[num_tokens, hidden]`) and the per-head q/k norms of Qwen3 (`[num_tokens, heads, head_dim]`, a strided view of
a fused qkv). Not for LayerNorm: there is no mean and no bias.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import (
    FLOAT_DTYPES,
    next_power_of_2,
    require_dtype,
    require_shape,
    require_unit_stride,
)

# With 4096 fp32 values in registers, a program of 4 warps stays well below the register limit.
_TILE_ELEMENTS = 4096


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * (x / rms(x))`, the formula and the rounding of transformers' LlamaRMSNorm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` in place, in the input dtype, and returns `rms_norm(residual)`."""
    residual += x
    return rms_norm_reference(residual, weight, eps)


@triton.jit
@no_type_check
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    num_heads,
    x_stride_token,
    x_stride_head,
    residual_stride_token,
    residual_stride_head,
    y_stride_token,
    y_stride_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, DIM_PAD)
    mask = (heads < num_heads) & (dims < DIM)[None, :]

    x_offsets = token * x_stride_token + heads * x_stride_head + dims[None, :]
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    # Loaded before the sum is known, so that its latency is not added to that of the rows.
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0)
    if ADD_RESIDUAL:
        residual_offsets = token * residual_stride_token + heads * residual_stride_head + dims[None, :]
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)
        # The sum is rounded before it is normalised, because the next layer reads the rounded residual.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + residual_offsets, x, mask=mask)
    wide = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
    normalised = (wide * inverse_rms[:, None]).to(x.dtype)
    y = normalised.to(tl.float32) * weight.to(tl.float32)[None, :]
    y_offsets = token * y_stride_token + heads * y_stride_head + dims[None, :]
    tl.store(y_ptr + y_offsets, y.to(x.dtype), mask=mask)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dim() not in (2, 3):
        raise ValueError(f"x has {x.dim()} dimensions, expected 2 or 3")
    require_dtype("x", x, *FLOAT_DTYPES)
    require_unit_stride("x", x)
    require_shape("weight", weight, (x.shape[-1],))
    require_dtype("weight", weight, x.dtype)
    require_unit_stride("weight", weight)
    if residual is not None:
        require_shape("residual", residual, x.shape)
        require_dtype("residual", residual, x.dtype)
        require_unit_stride("residual", residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    # A two-dimensional tensor has one "head"; its head stride is never used.
    strides = [(t.stride(0), t.stride(1) if t.dim() == 3 else 0) for t in (x, x if residual is None else residual, y)]
    dim_pad = next_power_of_2(x.shape[-1])
    heads = min(next_power_of_2(num_heads), max(1, _TILE_ELEMENTS // dim_pad))
    _rms_norm_kernel[(x.shape[0], triton.cdiv(num_heads, heads))](
        x,
        x if residual is None else residual,
        weight,
        y,
        eps,
        num_heads,
        *strides[0],
        *strides[1],
        *strides[2],
        DIM=x.shape[-1],
        DIM_PAD=dim_pad,
        HEADS=heads,
        ADD_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, heads * dim_pad // 512)),
    )
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: `[num_tokens, hidden]` or `[num_tokens, heads, head_dim]`, fp32/fp16/bf16, last stride 1.
        weight: `[last dimension of x]`, dtype of x.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place (in the input dtype), then RMSNorm of the residual.

    Arguments, result and errors as `rms_norm`; `residual` has x's shape and dtype and is overwritten.
    """
    return _launch(x, residual, weight, eps)
