"""Masks with one bit per token, as grammars fill them, applied to some rows of logits."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FLOAT_DTYPES, require_dtype, require_shape, require_unit_stride

_WORD = tl.constexpr(32)  # bits
_WORDS = 64  # per program: 2,048 tokens


def apply_bitmask_reference(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """The same as `apply_bitmask`, with a number for each bit."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    may_come = ((bitmask[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 1
    logits[rows] = logits[rows].masked_fill(~may_come, -torch.inf)


@triton.jit
@no_type_check
def _bitmask_kernel(
    logits_ptr, rows_ptr, bitmask_ptr, vocab_size, num_words, logits_stride, bitmask_stride, WORDS: tl.constexpr
):
    masked = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + masked)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask_ptr + masked * bitmask_stride + words, mask=words < num_words, other=0)
    shifts = tl.arange(0, _WORD)
    tokens = words[:, None] * _WORD + shifts[None, :]
    is_forbidden = ((bits[:, None] >> shifts[None, :]) & 1) == 0
    # Logits of allowed tokens are neither read nor written.
    forbidden = tl.full([WORDS, _WORD], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + tokens, forbidden, mask=is_forbidden & (tokens < vocab_size))


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of tokens without a bit to -inf, in place. Other rows, and tokens with a bit, do not change.

    Args:
        logits: `[num_rows, vocab]` floats, rows dense.
        rows: `[n]` int64, the rows to mask, each once.
        bitmask: `[n, ceil(vocab / 32)]` int32: token `t` has bit `t % 32` of word `t // 32`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("logits", logits, ("num_rows", "vocab"))
    require_dtype("logits", logits, *FLOAT_DTYPES)
    require_shape("rows", rows, ("n",))
    require_dtype("rows", rows, torch.int64)
    num_words = -(-logits.shape[1] // 32)
    require_shape("bitmask", bitmask, (rows.shape[0], num_words))
    require_dtype("bitmask", bitmask, torch.int32)
    for name, tensor in (("logits", logits), ("rows", rows), ("bitmask", bitmask)):
        require_unit_stride(name, tensor)
    _bitmask_kernel[(triton.cdiv(num_words, _WORDS), rows.shape[0])](
        logits,
        rows,
        bitmask,
        logits.shape[1],
        num_words,
        logits.stride(0),
        bitmask.stride(0),
        WORDS=_WORDS,
        num_warps=4,
    )
