"""SwiGLU's elementwise half: `silu(gate) * up` over a fused gate/up projection."""

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


@triton.jit
@no_type_check
def _silu_mul_kernel(gate_up_ptr, out_ptr, intermediate, gate_up_stride_token, out_stride_token, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < intermediate
    row_ptr = gate_up_ptr + token * gate_up_stride_token
    gate = tl.load(row_ptr + dims, mask=mask, other=0.0)
    up = tl.load(row_ptr + intermediate + dims, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
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
    require_shape("gate_up", gate_up, ("num_tokens", "2 * intermediate"))
    require_dtype("gate_up", gate_up, *FLOAT_DTYPES)
    require_unit_stride("gate_up", gate_up)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up has width {width}, expected an even number")
    intermediate = width // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(num_tokens, triton.cdiv(intermediate, _BLOCK))](
        gate_up, out, intermediate, gate_up.stride(0), out.stride(0), BLOCK=_BLOCK, num_warps=4
    )
    return out
