"""The two kernels behind `sampling.sample`: one reads each row once, the other draws from the relevant part of it.

The vocabulary is cut into groups of consecutive tokens. `group_kernel`, with many programs per row, reads the logits and writes
every group's largest logit and its mass. `draw_kernel`, one program per row, uses these to find the groups that can hold a token
that passes the filters, and reads no others: with top-k 50 about 60 groups of 4008. The cuts of top-k and top-p are found by
bisection over an order-preserving integer image of the logits, so that equal logits are kept or dropped together. Do not launch
these; `sampling` does.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# Keeps 1 / temperature finite: 0 * inf at the maximum would be NaN.
MIN_TEMPERATURE = tl.constexpr(1.0e-30)
# 2 to the power of minus this is 0 in fp32.
_ZERO_EXPONENT = tl.constexpr(160.0)
# Groups to read first if there is only top-p: enough for most distributions of models.
_FIRST_GROUPS = tl.constexpr(64)


@triton.jit
@no_type_check
def _keys(logits):
    """The order-preserving int32 image of fp32 numbers."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _load_logits(row_ptr, tokens, present):
    """NaN and absent logits become -inf, and -0.0 becomes 0.0, so that keys compare as the logits do."""
    logits = tl.load(row_ptr + tokens, mask=present, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))  # noqa: PLR0124
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
@no_type_check
def _weights(logits, maximum, exponent_scale):
    """exp((logit - maximum) / temperature); 1 at the maximum even if that is infinite."""
    at_maximum = logits == maximum
    difference = tl.where(at_maximum, 0.0, logits - tl.where(at_maximum, 0.0, maximum))
    return tl.exp2(difference * exponent_scale)


@triton.jit
@no_type_check
def group_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    masses_ptr,
    vocab,
    num_groups,
    logits_stride_seq,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Writes every group's largest logit, and the sum of its weights relative to that logit."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = _load_logits(logits_ptr + row * logits_stride_seq, tokens, tokens < vocab)
    maxima = tl.max(logits, axis=1)
    results = row * num_groups + groups
    tl.store(maxima_ptr + results, maxima, mask=groups < num_groups)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        weights = _weights(logits, maxima[:, None], LOG2_E / tl.maximum(temperature, MIN_TEMPERATURE))
        masses = tl.sum(tl.where(tokens < vocab, weights, 0.0), axis=1)
        tl.store(masses_ptr + results, masses, mask=groups < num_groups)


@triton.jit
@no_type_check
def _load_candidates(row_ptr, list_ptr, num_listed, start, vocab, num_groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of the listed groups: its tokens in order, whether each exists, its logits and its keys."""
    places = start + tl.arange(0, BLOCK)
    slots = places // GROUP
    # If all groups are listed, the list need not be read.
    is_all = num_listed == num_groups
    listed = tl.load(list_ptr + slots, mask=(slots < num_listed) & (not is_all), other=0)
    tokens = tl.where(is_all, slots, listed) * GROUP + places % GROUP
    present = (slots < num_listed) & (tokens < vocab)
    logits = _load_logits(row_ptr, tokens, present)
    return tokens, present, logits, _keys(logits)


@triton.jit
@no_type_check
def _count_and_mass(
    row_ptr,
    list_ptr,
    num_listed,
    vocab,
    num_groups,
    threshold,
    maximum,
    exponent_scale,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The number of candidates with a key >= threshold, and the sum of their weights.

    The order of the sum does not depend on the threshold, so the sum is monotone in it.
    """
    count = vocab * 0
    mass = 0.0
    for start in range(0, num_listed * GROUP, BLOCK):
        _, present, logits, keys = _load_candidates(
            row_ptr, list_ptr, num_listed, start, vocab, num_groups, GROUP, BLOCK
        )
        above = present & (keys >= threshold)
        count += tl.sum(above.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(above, _weights(logits, maximum, exponent_scale), 0.0), axis=0)
    return count, mass


@triton.jit
@no_type_check
def _draw(
    row_ptr,
    list_ptr,
    num_listed,
    vocab,
    num_groups,
    threshold,
    min_p,
    target,
    maximum,
    exponent_scale,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first candidate whose cumulative weight exceeds the target; if rounding leaves none, the last one."""
    cumulative = 0.0
    drawn = vocab
    last_candidate = vocab * 0
    for start in range(0, num_listed * GROUP, BLOCK):
        tokens, present, logits, keys = _load_candidates(
            row_ptr, list_ptr, num_listed, start, vocab, num_groups, GROUP, BLOCK
        )
        weights = _weights(logits, maximum, exponent_scale)
        candidate = present & (keys >= threshold) & (weights >= min_p) & (weights > 0.0)
        weights = tl.where(candidate, weights, 0.0)
        passed = candidate & (cumulative + tl.cumsum(weights, axis=0) > target)
        drawn = tl.minimum(drawn, tl.min(tl.where(passed, tokens, vocab), axis=0))
        last_candidate = tl.maximum(last_candidate, tl.max(tl.where(candidate, tokens, 0), axis=0))
        cumulative += tl.sum(weights, axis=0)
    return tl.where(drawn < vocab, drawn, last_candidate)


@triton.jit
@no_type_check
def _largest_groups(keys, useful, capacity):
    """A threshold that at most `capacity` useful groups reach, and, except for ties, at least half as many."""
    low = tl.min(tl.where(useful, keys, 2147483647), axis=0).to(tl.int64)
    high = tl.max(tl.where(useful, keys, -2147483648), axis=0).to(tl.int64) + 1
    high_count = capacity * 0
    while (high - low > 1) & (2 * high_count < capacity):
        middle = low + (high - low) // 2
        count = tl.sum((useful & (keys >= middle.to(tl.int32))).to(tl.int32), axis=0)
        fits = count <= capacity
        high = tl.where(fits, middle, high)
        high_count = tl.where(fits, count, high_count)
        low = tl.where(fits, low, middle)
    return high


@triton.jit
@no_type_check
def draw_kernel(
    logits_ptr,
    maxima_ptr,
    masses_ptr,
    list_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    tokens_ptr,
    vocab,
    num_groups,
    logits_stride_seq,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Draws one row's token; see `sampling.sample` for the arguments."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_seq
    list_ptr += row * num_groups
    groups = tl.arange(0, GROUPS)
    exists = groups < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=exists, other=float("-inf"))
    maximum = tl.max(maxima, axis=0)
    members = tl.arange(0, GROUP)

    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        first_group = tl.min(tl.where(exists & (maxima == maximum), groups, GROUPS), axis=0)
        tokens = first_group * GROUP + members
        largest = _load_logits(row_ptr, tokens, tokens < vocab) == maximum
        tl.store(tokens_ptr + row, tl.min(tl.where(largest, tokens, vocab), axis=0).to(tl.int64))
        return

    exponent_scale = LOG2_E / tl.maximum(temperature, MIN_TEMPERATURE)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    uniform = tl.load(uniforms_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    has_top_p = top_p < 1.0
    group_weights = tl.where(exists, _weights(maxima, maximum, exponent_scale), 0.0)
    masses = tl.load(masses_ptr + row * num_groups + groups, mask=exists, other=0.0) * group_weights
    row_mass = tl.sum(masses, axis=0)

    if not (has_top_k | has_top_p | (min_p > 0.0)):
        target = uniform * row_mass
        passed = (masses > 0.0) & (tl.cumsum(masses, axis=0) > target)
        group = tl.min(tl.where(passed, groups, GROUPS), axis=0)
        last_group = tl.max(tl.where(masses > 0.0, groups, 0), axis=0)
        # If rounding keeps the cumulative sum below the target, no group passes. Then it is the last token that can be
        # drawn.
        before = tl.where(group < GROUPS, tl.sum(tl.where(groups < group, masses, 0.0), axis=0), float("-inf"))
        tokens = tl.minimum(group, last_group) * GROUP + members
        present = tokens < vocab
        weights = _weights(_load_logits(row_ptr, tokens, present), maximum, exponent_scale)
        weights = tl.where(present, weights, 0.0)
        passed = (weights > 0.0) & (tl.cumsum(weights, axis=0) > target - before)
        drawn = tl.min(tl.where(passed, tokens, vocab), axis=0)
        last_token = tl.max(tl.where(weights > 0.0, tokens, 0), axis=0)
        tl.store(tokens_ptr + row, tl.where(drawn < vocab, drawn, last_token).to(tl.int64))
        return

    # Groups whose largest weight is 0, or too small if only min-p applies, have nothing to draw.
    only_min_p = not (has_top_k | has_top_p)
    useful = (group_weights > 0.0) & ((group_weights >= min_p) | (not only_min_p))
    num_useful = tl.sum(useful.to(tl.int32), axis=0)
    group_keys = _keys(maxima)
    # Logits below have weight 0, and no filter needs them.
    floor = _keys(maximum - _ZERO_EXPONENT / exponent_scale).to(tl.int64)
    # Every group's maximum is a token, so top_k groups have at least top_k tokens above the threshold. Whether they have
    # the mass of top-p must be
    # checked.
    capacity = tl.where(has_top_k, 2 * tl.minimum(tl.maximum(top_k, _FIRST_GROUPS // 2), GROUPS), _FIRST_GROUPS)
    low = floor
    low_count = vocab * 0
    mass = 0.0
    num_listed = vocab * 0
    enough = False
    while not enough:
        complete = only_min_p | (num_useful <= capacity)
        low = floor
        if not complete:
            low = _largest_groups(group_keys, useful, capacity)
        chosen = useful & (complete | (group_keys >= low.to(tl.int32)))
        num_listed = tl.sum(chosen.to(tl.int32), axis=0)
        # Some threads write the list and others read it, also in the iteration before.
        tl.debug_barrier()
        tl.store(list_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, groups, mask=chosen)
        tl.debug_barrier()
        low_count, mass = _count_and_mass(
            row_ptr, list_ptr, num_listed, vocab, num_groups, low.to(tl.int32), maximum, exponent_scale, GROUP, BLOCK
        )
        enough = complete | tl.where(has_top_k, low_count >= top_k, mass >= top_p * row_mass)
        capacity *= 8

    # Invariant of both searches: the logits with a key >= low suffice, those with a key >= high do not. They may stop
    # early: top-k when exactly k
    # logits are left, top-p when at most one is in [low, high).
    above_all = _keys(maximum).to(tl.int64) + 1
    if has_top_k:
        high = above_all
        while (high - low > 1) & (low_count > top_k):
            middle = low + (high - low) // 2
            count, middle_mass = _count_and_mass(
                row_ptr,
                list_ptr,
                num_listed,
                vocab,
                num_groups,
                middle.to(tl.int32),
                maximum,
                exponent_scale,
                GROUP,
                BLOCK,
            )
            reached = count >= top_k
            low = tl.where(reached, middle, low)
            low_count = tl.where(reached, count, low_count)
            mass = tl.where(reached, middle_mass, mass)
            high = tl.where(reached, high, middle)
    if has_top_p:
        target = top_p * tl.where(has_top_k, mass, row_mass)
        high = above_all
        high_count = vocab * 0
        while (high - low > 1) & (low_count - high_count > 1):
            middle = low + (high - low) // 2
            count, middle_mass = _count_and_mass(
                row_ptr,
                list_ptr,
                num_listed,
                vocab,
                num_groups,
                middle.to(tl.int32),
                maximum,
                exponent_scale,
                GROUP,
                BLOCK,
            )
            reached = middle_mass >= target
            low = tl.where(reached, middle, low)
            low_count = tl.where(reached, count, low_count)
            high = tl.where(reached, high, middle)
            high_count = tl.where(reached, high_count, count)

    threshold = low.to(tl.int32)
    total = 0.0
    for start in range(0, num_listed * GROUP, BLOCK):
        _, present, logits, keys = _load_candidates(
            row_ptr, list_ptr, num_listed, start, vocab, num_groups, GROUP, BLOCK
        )
        weights = _weights(logits, maximum, exponent_scale)
        total += tl.sum(tl.where(present & (keys >= threshold) & (weights >= min_p), weights, 0.0), axis=0)
    drawn = _draw(
        row_ptr,
        list_ptr,
        num_listed,
        vocab,
        num_groups,
        threshold,
        min_p,
        uniform * total,
        maximum,
        exponent_scale,
        GROUP,
        BLOCK,
    )
    tl.store(tokens_ptr + row, drawn.to(tl.int64))
