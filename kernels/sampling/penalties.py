"""Repetition, presence and frequency penalties, applied in place to sparse entries of the logits.

An entry is a (row, token) pair that occurs in the row's prompt or output. The caller keeps the counts, except for one token per row
that it may not know yet: the device counts that.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import require_dtype, require_shape, require_unit_stride

_BLOCK = 256
# Entries of a row that are searched at once for the token that the device counts: 8 per thread.
_SEARCH_BLOCK = 1024


class NewTokens(NamedTuple):
    """One more output token for some rows, which no entry counts yet.

    If the token has an entry, its count grows; otherwise it gets one.
    """

    token_ids: torch.Tensor  # [num_seqs] int64; arbitrary where there is none
    counts: torch.Tensor  # [num_seqs] int32, 1 where there is one, else 0
    row_starts: torch.Tensor  # [num_seqs + 1] int32, start of each row's entries; entries must be ordered by row


def apply_penalties_reference(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    new: NewTokens | None = None,
) -> None:
    """The same as `apply_penalties`, in a few vectorised torch operations."""
    if new is not None:
        is_counted = (token_ids == new.token_ids[row_ids]) & (new.counts[row_ids] > 0)
        is_missing = new.counts > 0
        is_missing[row_ids[is_counted]] = False
        missing = is_missing.nonzero()[:, 0]
        row_ids = torch.cat((row_ids, missing))
        token_ids = torch.cat((token_ids, new.token_ids[missing]))
        output_counts = torch.cat((output_counts + is_counted, new.counts[missing]))
    values = logits[row_ids, token_ids]
    factor = repetition[row_ids]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[row_ids] * output_counts + presence[row_ids] * (output_counts > 0)
    logits[row_ids, token_ids] = values


@triton.jit
@no_type_check
def _penalize(logit_ptrs, mask, counts, factor, presence, frequency):
    values = tl.load(logit_ptrs, mask=mask, other=0.0)
    values = tl.where(values > 0.0, values / factor, values * factor)
    values -= frequency * counts.to(tl.float32) + tl.where(counts > 0, presence, 0.0)
    tl.store(logit_ptrs, values, mask=mask)


@triton.jit
@no_type_check
def _num_found(token_ids_ptr, row_starts_ptr, row, token, SEARCH_BLOCK: tl.constexpr):
    # The number of the row's entries for the token.
    start = tl.load(row_starts_ptr + row)
    end = tl.load(row_starts_ptr + row + 1)
    num_found = tl.zeros([SEARCH_BLOCK], tl.int32)
    for first in range(start, end, SEARCH_BLOCK):
        entries = first + tl.arange(0, SEARCH_BLOCK)
        tokens = tl.load(token_ids_ptr + entries, mask=entries < end, other=0)
        num_found += ((tokens == token) & (entries < end)).to(tl.int32)
    return tl.sum(num_found)


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
    new_token_ids_ptr,
    new_counts_ptr,
    row_starts_ptr,
    num_entries,
    logits_stride_seq,
    HAS_NEW: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    if first < num_entries:
        entries = first + tl.arange(0, BLOCK)
        mask = entries < num_entries
        rows = tl.load(row_ids_ptr + entries, mask=mask, other=0)
        tokens = tl.load(token_ids_ptr + entries, mask=mask, other=0)
        counts = tl.load(output_counts_ptr + entries, mask=mask, other=0)
        factor = tl.load(repetition_ptr + rows, mask=mask, other=1.0)
        presence = tl.load(presence_ptr + rows, mask=mask, other=0.0)
        frequency = tl.load(frequency_ptr + rows, mask=mask, other=0.0)
        if HAS_NEW:
            new_tokens = tl.load(new_token_ids_ptr + rows, mask=mask, other=0)
            new_counts = tl.load(new_counts_ptr + rows, mask=mask, other=0)
            counts += tl.where(tokens == new_tokens, new_counts, 0)
        _penalize(logits_ptr + rows * logits_stride_seq + tokens, mask, counts, factor, presence, frequency)
    elif HAS_NEW:
        # One program per row, after those of the entries.
        row = (tl.program_id(0) - tl.cdiv(num_entries, BLOCK)).to(tl.int64)
        new_token = tl.load(new_token_ids_ptr + row)
        new_count = tl.load(new_counts_ptr + row)
        if new_count > 0:
            num_found = _num_found(token_ids_ptr, row_starts_ptr, row, new_token, SEARCH_BLOCK)
            _penalize(
                logits_ptr + row * logits_stride_seq + new_token,
                num_found == 0,
                new_count,
                tl.load(repetition_ptr + row),
                tl.load(presence_ptr + row),
                tl.load(frequency_ptr + row),
            )


def apply_penalties(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    new: NewTokens | None = None,
) -> None:
    """Penalise the given entries of `logits` in place.

    logit / repetition if the logit is positive, else logit * repetition, for every entry; then
    minus frequency * count + presence * (count > 0), as OpenAI's API defines the latter two.

    With `new` the result is the same, bit for bit, as if its tokens had been counted among the entries.
    Values are read on the device only; nothing of `[num_seqs, vocab]` is made.

    Args:
        logits: `[num_seqs, vocab]` fp32, last stride 1, changed in place.
        row_ids, token_ids: `[num_entries]` int64, unique pairs within the bounds of logits.
        output_counts: `[num_entries]` int32, occurrences in the output; 0 if only in the prompt.
        repetition, presence, frequency: `[num_seqs]` fp32; 1, 0 and 0 change nothing.
        new: a further token of each row, or of some.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("logits", logits, ("num_seqs", "vocab"))
    require_dtype("logits", logits, torch.float32)
    require_unit_stride("logits", logits)
    num_seqs, num_entries = logits.shape[0], row_ids.numel()
    vectors = [
        ("row_ids", row_ids, num_entries, torch.int64),
        ("token_ids", token_ids, num_entries, torch.int64),
        ("output_counts", output_counts, num_entries, torch.int32),
        ("repetition", repetition, num_seqs, torch.float32),
        ("presence", presence, num_seqs, torch.float32),
        ("frequency", frequency, num_seqs, torch.float32),
    ]
    if new is not None:
        vectors += [
            ("new.token_ids", new.token_ids, num_seqs, torch.int64),
            ("new.counts", new.counts, num_seqs, torch.int32),
            ("new.row_starts", new.row_starts, num_seqs + 1, torch.int32),
        ]
    for name, tensor, size, dtype in vectors:
        require_shape(name, tensor, (size,))
        require_dtype(name, tensor, dtype)
        require_unit_stride(name, tensor)
    _penalties_kernel[(triton.cdiv(num_entries, _BLOCK) + (0 if new is None else num_seqs),)](
        logits,
        row_ids,
        token_ids,
        output_counts,
        repetition,
        presence,
        frequency,
        *(new or (None, None, None)),
        num_entries,
        logits.stride(0),
        HAS_NEW=new is not None,
        BLOCK=_BLOCK,
        SEARCH_BLOCK=_SEARCH_BLOCK,
        num_warps=4,
    )
