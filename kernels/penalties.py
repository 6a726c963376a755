"""Repetition, presence and frequency penalties, applied in place to sparse entries of the logits.

An entry is a (row, token) pair that occurs in the row's prompt or output. Keeping the counts is the
caller's business.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import require_dtype, require_shape, require_unit_stride

_BLOCK = 256


def apply_penalties_reference(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """The same contract as `apply_penalties`, in a few vectorised torch operations; the CPU engine's path."""
    values = logits[row_ids, token_ids]
    factor = repetition[row_ids]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[row_ids] * output_counts + presence[row_ids] * (output_counts > 0)
    logits[row_ids, token_ids] = values


@triton.jit(do_not_specialize=["num_entries"])
@no_type_check
def _penalties_kernel(
    logits_ptr,
    row_ids_ptr,
    token_ids_ptr,
    output_counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    num_entries,
    logits_stride_seq,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < num_entries
    rows = tl.load(row_ids_ptr + entries, mask=mask, other=0)
    tokens = tl.load(token_ids_ptr + entries, mask=mask, other=0)
    counts = tl.load(output_counts_ptr + entries, mask=mask, other=0)
    factor = tl.load(repetition_ptr + rows, mask=mask, other=1.0)
    presence = tl.load(presence_ptr + rows, mask=mask, other=0.0)
    frequency = tl.load(frequency_ptr + rows, mask=mask, other=0.0)
    logit_ptrs = logits_ptr + rows * logits_stride_seq + tokens
    values = tl.load(logit_ptrs, mask=mask, other=0.0)
    values = tl.where(values > 0.0, values / factor, values * factor)
    values -= frequency * counts.to(tl.float32) + tl.where(counts > 0, presence, 0.0)
    tl.store(logit_ptrs, values, mask=mask)


def apply_penalties(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise the given entries of `logits` in place.

    logit / repetition if the logit is positive, else logit * repetition, for every entry; then
    minus frequency * count + presence * (count > 0), as OpenAI's API defines the latter two.

    Args:
        logits: `[num_seqs, vocab]` fp32, last stride 1, changed in place.
        row_ids, token_ids: `[num_entries]` int64, unique pairs within the bounds of logits.
        output_counts: `[num_entries]` int32, occurrences in the output; 0 if only in the prompt.
        repetition, presence, frequency: `[num_seqs]` fp32; 1, 0 and 0 change nothing.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("logits", logits, ("num_seqs", "vocab"))
    require_dtype("logits", logits, torch.float32)
    require_unit_stride("logits", logits)
    num_seqs, num_entries = logits.shape[0], row_ids.numel()
    for name, tensor, size, dtype in (
        ("row_ids", row_ids, num_entries, torch.int64),
        ("token_ids", token_ids, num_entries, torch.int64),
        ("output_counts", output_counts, num_entries, torch.int32),
        ("repetition", repetition, num_seqs, torch.float32),
        ("presence", presence, num_seqs, torch.float32),
        ("frequency", frequency, num_seqs, torch.float32),
    ):
        require_shape(name, tensor, (size,))
        require_dtype(name, tensor, dtype)
        require_unit_stride(name, tensor)
    _penalties_kernel[(triton.cdiv(num_entries, _BLOCK),)](
        logits,
        row_ids,
        token_ids,
        output_counts,
        repetition,
        presence,
        frequency,
        num_entries,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
