"""Next-token sampling: temperature, top-k, top-p, min-p and an inverse-CDF draw, without a sort.

One program samples one row. The cut of top-k and that of top-p are found by bisection over the
order-preserving integer image of the logits, so that equal logits are kept or dropped together. The
uniform number comes from the caller: this module holds no random state. The penalties, which come before,
live in `penalties`.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import next_power_of_2, require_dtype, require_shape, require_unit_stride

_LOG2_E = math.log2(math.e)
_MAX_BLOCK = 8192
# Keeps 1 / temperature finite: 0 * inf at the maximum would be NaN.
_MIN_TEMPERATURE = tl.constexpr(1.0e-30)


def kept_mask_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that survive the filters, and their weights.

    Arguments as `sample`; rows with temperature 0 are treated as temperature 1.

    Returns:
        `kept [num_seqs, vocab]` bool and `weights [num_seqs, vocab]` float64, 1 for the largest logit,
        0 where not kept.
    """
    vocab = logits.shape[1]
    wide = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).double()
    divisor = torch.where(temperature > 0, temperature, 1.0).double().clamp(min=_MIN_TEMPERATURE.value)
    maximum = wide.amax(1, keepdim=True)
    weights = torch.where(wide == maximum, 1.0, ((wide - maximum) / divisor[:, None]).exp())
    sorted_logits, order = wide.sort(dim=1, descending=True)

    kth = torch.where((top_k > 0) & (top_k < vocab), top_k.long(), vocab) - 1
    kept = wide >= sorted_logits.gather(1, kth[:, None])

    mass = torch.where(kept, weights, 0.0).gather(1, order).cumsum(1)
    last = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp(max=vocab - 1)
    nucleus = kept & (wide >= sorted_logits.gather(1, last))
    kept = torch.where((top_p < 1)[:, None], nucleus, kept)

    kept &= weights >= min_p.double()[:, None]
    return kept, torch.where(kept, weights, 0.0)


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """The same contract as `sample`, with a sort and float64 sums."""
    clean = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    greedy = (clean == clean.amax(1, keepdim=True)).int().argmax(1)
    _, weights = kept_mask_reference(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    drawn = ((cumulative > target) & (weights > 0)).int().argmax(1)
    return torch.where(temperature > 0, drawn, greedy)


@triton.jit
@no_type_check
def _load_logits(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """A tile of logits, its token ids, and its order-preserving int32 keys.

    NaN becomes -inf and -0.0 becomes 0.0, so that keys compare as the logits do.
    """
    tokens = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))  # noqa: PLR0124
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.int32, bitcast=True)
    return tokens, logits, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _weights(logits, maximum, exponent_scale):
    """exp((logit - maximum) / temperature); 1 at the maximum even where that is infinite."""
    at_maximum = logits == maximum
    difference = tl.where(at_maximum, 0.0, logits - tl.where(at_maximum, 0.0, maximum))
    return tl.exp2(difference * exponent_scale)


@triton.jit
@no_type_check
def _count_and_mass(row_ptr, vocab, threshold, maximum, exponent_scale, BLOCK: tl.constexpr, WITH_MASS: tl.constexpr):
    """Number of logits with a key >= threshold, and the sum of their weights.

    The order of the sum does not depend on the threshold, hence the sum is monotone in it.
    """
    count = vocab * 0
    mass = 0.0
    for start in range(0, vocab, BLOCK):
        tokens, logits, keys = _load_logits(row_ptr, start, vocab, BLOCK)
        above = (keys >= threshold) & (tokens < vocab)
        count += tl.sum(above.to(tl.int32), axis=0)
        if WITH_MASS:
            weights = _weights(logits, maximum, exponent_scale)
            mass += tl.sum(tl.where(above, weights, 0.0), axis=0)
    return count, mass


@triton.jit
@no_type_check
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    tokens_ptr,
    vocab,
    logits_stride_seq,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_seq

    maximum = float("-inf")
    max_key = -2147483648
    min_key = 2147483647
    best_token = vocab * 0
    for start in range(0, vocab, BLOCK):
        tokens, logits, keys = _load_logits(row_ptr, start, vocab, BLOCK)
        tile_maximum, tile_best = tl.max(logits, axis=0, return_indices=True)
        best_token = tl.where(tile_maximum > maximum, start + tile_best, best_token)
        maximum = tl.maximum(maximum, tile_maximum)
        max_key = tl.maximum(max_key, tl.max(keys, axis=0))
        min_key = tl.minimum(min_key, tl.min(tl.where(tokens < vocab, keys, 2147483647), axis=0))

    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        tl.store(tokens_ptr + row, best_token.to(tl.int64))
        return
    exponent_scale = LOG2_E / tl.maximum(temperature, _MIN_TEMPERATURE)

    # Both searches keep: the logits with a key >= low are enough, those with a key >= high are not. They
    # may stop early: top-k when exactly k logits are left, top-p when at most one lies in [low, high).
    # 64-bit, since high - low may exceed 2**31.
    low = min_key.to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab):
        high = max_key.to(tl.int64) + 1
        low_count = vocab
        while (high - low > 1) & (low_count > top_k):
            middle = low + (high - low) // 2
            count, _ = _count_and_mass(row_ptr, vocab, middle.to(tl.int32), maximum, exponent_scale, BLOCK, False)
            enough = count >= top_k
            low = tl.where(enough, middle, low)
            low_count = tl.where(enough, count, low_count)
            high = tl.where(enough, high, middle)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        high = max_key.to(tl.int64) + 1
        high_count = vocab * 0
        low_count, mass = _count_and_mass(row_ptr, vocab, low.to(tl.int32), maximum, exponent_scale, BLOCK, True)
        target = top_p * mass
        while (high - low > 1) & (low_count - high_count > 1):
            middle = low + (high - low) // 2
            count, mass = _count_and_mass(row_ptr, vocab, middle.to(tl.int32), maximum, exponent_scale, BLOCK, True)
            enough = mass >= target
            low = tl.where(enough, middle, low)
            low_count = tl.where(enough, count, low_count)
            high = tl.where(enough, high, middle)
            high_count = tl.where(enough, high_count, count)

    threshold = low.to(tl.int32)
    min_p = tl.load(min_p_ptr + row)
    total = 0.0
    for start in range(0, vocab, BLOCK):
        tokens, logits, keys = _load_logits(row_ptr, start, vocab, BLOCK)
        weights = _weights(logits, maximum, exponent_scale)
        kept = (tokens < vocab) & (keys >= threshold) & (weights >= min_p)
        total += tl.sum(tl.where(kept, weights, 0.0), axis=0)

    target = tl.load(uniforms_ptr + row) * total
    cumulative = 0.0
    drawn = vocab
    # A rounded cumulative sum may stay below the target to the end: then the last candidate is drawn.
    last_candidate = best_token
    for start in range(0, vocab, BLOCK):
        tokens, logits, keys = _load_logits(row_ptr, start, vocab, BLOCK)
        weights = _weights(logits, maximum, exponent_scale)
        candidate = (tokens < vocab) & (keys >= threshold) & (weights >= min_p) & (weights > 0.0)
        weights = tl.where(candidate, weights, 0.0)
        passed = candidate & (cumulative + tl.cumsum(weights, axis=0) > target)
        drawn = tl.minimum(drawn, tl.min(tl.where(passed, tokens, vocab), axis=0))
        tile_last = tl.max(tl.where(candidate, tokens, -1), axis=0)
        last_candidate = tl.where(tile_last >= 0, tile_last, last_candidate)
        cumulative += tl.sum(weights, axis=0)
    drawn = tl.where(drawn < vocab, drawn, last_candidate)
    tl.store(tokens_ptr + row, drawn.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row.

    In this order: divide by the temperature; top-k keeps the logits >= the k-th largest; top-p keeps the
    smallest set of most probable tokens whose share of what top-k left is >= top_p, with all ties of its
    last token; min-p keeps probabilities >= min_p times the largest. The token drawn is the first, in
    vocabulary order, whose cumulative probability exceeds `uniform * total`. Sums are fp32: where top_p or
    the uniform lies within rounding of a boundary, the token on either side may be taken; a token that the
    filters exclude never is, unless a row has no logit above -inf.

    Args:
        logits: `[num_seqs, vocab]` fp32, last stride 1; NaN counts as -inf. Not changed.
        temperature: `[num_seqs]` fp32; 0 takes the largest logit, of several the lowest token id.
        top_k: `[num_seqs]` int32 or int64, 0 = off.
        top_p: `[num_seqs]` fp32, 1 = off.
        min_p: `[num_seqs]` fp32 in [0, 1], 0 = off.
        uniforms: `[num_seqs]` fp32 in [0, 1).

    Returns:
        `[num_seqs]` int64 token ids.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("logits", logits, ("num_seqs", "vocab"))
    require_dtype("logits", logits, torch.float32)
    require_unit_stride("logits", logits)
    num_seqs, vocab = logits.shape
    for name, tensor, dtypes in (
        ("temperature", temperature, (torch.float32,)),
        ("top_k", top_k, (torch.int32, torch.int64)),
        ("top_p", top_p, (torch.float32,)),
        ("min_p", min_p, (torch.float32,)),
        ("uniforms", uniforms, (torch.float32,)),
    ):
        require_shape(name, tensor, (num_seqs,))
        require_dtype(name, tensor, *dtypes)
        require_unit_stride(name, tensor)
    tokens = torch.empty((num_seqs,), dtype=torch.int64, device=logits.device)
    _sample_kernel[(num_seqs,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        tokens,
        vocab,
        logits.stride(0),
        BLOCK=min(_MAX_BLOCK, next_power_of_2(vocab)),
        LOG2_E=_LOG2_E,
        num_warps=16,
    )
    return tokens
