"""The elementwise half of SwiGLU over a fused gate/up projection: `silu(gate) * up`, and gpt-oss's variant with limits."""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.kernels.checks import FLOAT_DTYPES, require_dtype, require_shape, require_unit_stride

_BLOCK = 1024


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, silu rounded to the input dtype first, as transformers' LlamaMLP does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu_reference(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with gate at most `limit` and up within `[-limit, limit]`, rounded once."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


@triton.jit
@no_type_check
def _swiglu_kernel(
    gate_up_ptr,
    out_ptr,
    intermediate,
    gate_up_stride_token,
    out_stride_token,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < intermediate
    row_ptr = gate_up_ptr + token * gate_up_stride_token
    gate = tl.load(row_ptr + dims, mask=mask, other=0.0)
    up = tl.load(row_ptr + intermediate + dims, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if CLAMPED:
        wide = tl.where(wide > limit, limit, wide)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = (up + 1) * wide * tl.sigmoid(wide * alpha)
    else:
        out = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up
    tl.store(out_ptr + token * out_stride_token + dims, out.to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate_up: `[num_tokens, 2 * intermediate]`, gate first, fp32/fp16/bf16, last stride 1.

    Returns:
        A new tensor `[num_tokens, intermediate]` of the same dtype.

    Raises:
        ValueError: wrong rank, odd width, wrong dtype or stride.
    """
    return _swiglu(gate_up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with gate at most `limit` and up within `[-limit, limit]`.

    Arguments, result and errors as for `silu_mul`.
    """
    return _swiglu(gate_up, alpha, limit, is_clamped=True)


def _swiglu(gate_up: torch.Tensor, alpha: float = 1.0, limit: float = 0.0, *, is_clamped: bool = False) -> torch.Tensor:
    require_shape("gate_up", gate_up, ("num_tokens", "2 * intermediate"))
    require_dtype("gate_up", gate_up, *FLOAT_DTYPES)
    require_unit_stride("gate_up", gate_up)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up has width {width}, expected an even number")
    intermediate = width // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(num_tokens, triton.cdiv(intermediate, _BLOCK))](
        gate_up,
        out,
        intermediate,
        gate_up.stride(0),
        out.stride(0),
        alpha,
        limit,
        CLAMPED=is_clamped,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
