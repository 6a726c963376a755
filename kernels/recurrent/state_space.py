"""Selective state spaces (Mamba 2, Dao and Gu, 2024), token by token, for sequences of any lengths.

A head's state is a matrix `[head_size, state_size]`. A token lets it fade, adds the product of its inputs and its key, and asks it
with its query. How much of that happens depends on the token's own time step:

    state = state * exp(-rate * step)
    state = state + step * inputs ⊗ key
    output = state(query) + skip * inputs

Rows of the matrix need nothing of each other. A program has some of them, in registers, for all tokens of a sequence.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.kernels.checks import next_power_of_2, require_shape
from kvrelay.kernels.recurrent.gates import softplus
from kvrelay.kernels.recurrent.ragged import RaggedStates, SpaceInputs, require_recurrence

_ROWS_OF_SINGLE_TOKENS = 16  # of a program: it mostly moves states
_ROWS = 8  # with more tokens: each waits for the one before it, so more programs share the work
_NUMBERS = 2048  # of a state in a program, at most: more would not stay in registers


def state_space_reference(inputs: SpaceInputs, pool: torch.Tensor, states: RaggedStates) -> torch.Tensor:
    """The same contract as `state_space`, in float64; reads numbers on the host."""
    num_heads, head_size, state_size = pool.shape[1:]
    own = num_heads * head_size
    groups = (inputs.mixed.shape[1] - own) // 2
    value, key, query = torch.split(inputs.mixed.double(), [own, groups, groups], dim=1)
    value = value.reshape(-1, num_heads, head_size)
    key, query = (
        one.reshape(len(one), -1, state_size).repeat_interleave(num_heads * state_size // groups, dim=1)
        for one in (key, query)
    )
    out = torch.empty_like(value)
    token_starts, part_starts = states.token_starts.tolist(), states.part_starts.tolist()
    for seq in range(states.num_seqs):
        first, end = (token_starts[part] for part in part_starts[seq : seq + 2])
        steps = F.softplus(inputs.steps[first:end].double() + inputs.step_bias.double())
        if end - first > 1:
            steps = steps.clamp(*inputs.limits)
        state = torch.zeros_like(pool[0]) if states.is_new[seq] else pool[states.read[seq]]
        for part in range(*part_starts[seq : seq + 2]):
            for token in range(*token_starts[part : part + 2]):
                step = steps[token - first]
                state = state.double() * (-inputs.log_rates.double().exp() * step).exp()[:, None, None]
                state = state + torch.einsum("hp,hn->hpn", value[token] * step[:, None], key[token])
                out[token] = (
                    torch.einsum("hpn,hn->hp", state, query[token]) + value[token] * inputs.skip.double()[:, None]
                )
            pool[states.write[part]] = state.to(pool.dtype)
    return out.to(inputs.mixed.dtype)


@triton.jit(do_not_specialize_on_alignment=["steps_ptr", "is_new_ptr", "read_ptr", "write_ptr"])
@no_type_check
def _state_space_kernel(
    mixed_ptr,
    steps_ptr,
    log_rates_ptr,
    step_bias_ptr,
    skip_ptr,
    pool_ptr,
    out_ptr,
    token_starts_ptr,
    part_starts_ptr,
    read_ptr,
    is_new_ptr,
    write_ptr,
    shortest,
    longest,
    mixed_stride_token,
    steps_stride_token,
    pool_stride_block,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program for some rows of one head's state of one sequence."""
    seq, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, STATE_PAD)
    is_row, is_column = rows < HEAD_SIZE, columns < STATE_SIZE
    is_here = is_row[:, None] & is_column[None, :]
    in_block = (head * HEAD_SIZE + rows[:, None]) * STATE_SIZE + columns[None, :]
    num_keys: tl.constexpr = NUM_HEADS // HEADS_PER_KEY * STATE_SIZE
    values = mixed_ptr + head * HEAD_SIZE + rows
    keys = mixed_ptr + NUM_HEADS * HEAD_SIZE + head // HEADS_PER_KEY * STATE_SIZE + columns
    rate = tl.exp(tl.load(log_rates_ptr + head).to(tl.float32))
    step_bias, skip = tl.load(step_bias_ptr + head).to(tl.float32), tl.load(skip_ptr + head).to(tl.float32)

    first_part, end_part = tl.load(part_starts_ptr + seq), tl.load(part_starts_ptr + seq + 1)
    place = tl.load(token_starts_ptr + first_part).to(tl.int64)
    last = tl.load(token_starts_ptr + end_part) - 1
    # As in Mamba's own code, the limits do not hold for a token alone.
    shortest = tl.where(place < last, shortest, 0.0)
    longest = tl.where(place < last, longest, float("inf"))
    num_old_columns = STATE_SIZE * (1 - tl.load(is_new_ptr + seq).to(tl.int32))
    state = tl.load(
        pool_ptr + tl.load(read_ptr + seq) * pool_stride_block + in_block,
        mask=is_row[:, None] & (columns < num_old_columns)[None, :],
        other=0.0,
    )
    # A token's numbers are loaded while the one before it is computed.
    value = tl.load(values + place * mixed_stride_token, mask=is_row, other=0.0)
    key = tl.load(keys + place * mixed_stride_token, mask=is_column, other=0.0)
    query = tl.load(keys + num_keys + place * mixed_stride_token, mask=is_column, other=0.0)
    step = tl.load(steps_ptr + place * steps_stride_token + head)
    for part in range(first_part, end_part):
        for _ in range(tl.load(token_starts_ptr + part), tl.load(token_starts_ptr + part + 1)):
            next_place = tl.minimum(place + 1, last)
            next_value = tl.load(values + next_place * mixed_stride_token, mask=is_row, other=0.0)
            next_key = tl.load(keys + next_place * mixed_stride_token, mask=is_column, other=0.0)
            next_query = tl.load(keys + num_keys + next_place * mixed_stride_token, mask=is_column, other=0.0)
            next_step = tl.load(steps_ptr + next_place * steps_stride_token + head)

            given, shifted = value.to(tl.float32), step.to(tl.float32) + step_bias
            softened = softplus(shifted)
            softened = tl.minimum(tl.maximum(softened, shortest), longest)
            state = state * tl.exp(-rate * softened)
            state = state + (given * softened)[:, None] * key.to(tl.float32)[None, :]
            found = tl.sum(state * query.to(tl.float32)[None, :], axis=1) + given * skip
            tl.store(out_ptr + (place * NUM_HEADS + head) * HEAD_SIZE + rows, found, mask=is_row)
            place, value, key, query, step = next_place, next_value, next_key, next_query, next_step
        tl.store(pool_ptr + tl.load(write_ptr + part) * pool_stride_block + in_block, state, mask=is_here)


def state_space(inputs: SpaceInputs, pool: torch.Tensor, states: RaggedStates) -> torch.Tensor:
    """The outputs of all heads `[num_tokens, num_heads, head_size]`, contiguous, in the dtype of `mixed`; and the states.

    Args:
        inputs: see SpaceInputs. `num_heads` is a multiple of the number of keys, each of which serves as many heads that follow
            each other.
        pool: `[num_blocks, num_heads, head_size, state_size]` fp32, states; may be strided between blocks.
        states: where they are. States behind each part are written.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    of_heads = {"log_rates": inputs.log_rates, "step_bias": inputs.step_bias, "skip": inputs.skip}
    require_shape("pool", pool, ("num_blocks", "num_heads", "head_size", "state_size"))
    num_heads, head_size, state_size = pool.shape[1:]
    num_keys = require_recurrence(
        *(inputs.mixed, {"steps": inputs.steps}, of_heads, pool, states), value_size=head_size, key_size=state_size
    )
    out = torch.empty((states.num_tokens, num_heads, head_size), dtype=inputs.mixed.dtype, device=inputs.mixed.device)
    is_single = states.num_seqs == states.num_tokens
    most, state_pad = _ROWS_OF_SINGLE_TOKENS if is_single else _ROWS, next_power_of_2(state_size)
    rows = min(most, next_power_of_2(head_size), max(_NUMBERS // state_pad, 1))
    _state_space_kernel[(states.num_seqs, num_heads, triton.cdiv(head_size, rows))](
        *(inputs.mixed, inputs.steps, *of_heads.values(), pool, out, states.token_starts, states.part_starts),
        *(states.read, states.is_new.view(torch.uint8), states.write, *map(float, inputs.limits)),
        *(inputs.mixed.stride(0), inputs.steps.stride(0), pool.stride(0)),
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_keys,
        HEAD_SIZE=head_size,
        STATE_SIZE=state_size,
        STATE_PAD=state_pad,
        ROWS=rows,
        num_warps=1,
    )
    return out
