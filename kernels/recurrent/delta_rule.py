"""The gated delta rule (Gated DeltaNet, Yang et al., 2024), token by token, for sequences of any lengths.

A head's state is a matrix `[key_size, value_size]` that answers a key with a value. A token first lets it fade, then replaces what
it answers to the token's key, as far as `beta` says, by the token's value, and at last asks it with the query:

    state = state * decay
    state = state + key ⊗ (beta * (value - state(key)))
    output = state(query)

The output is computed beside `state(key)`, as `faded(query) + (key · query) * beta * (value - faded(key))`, so that no sum waits
for another.

Columns of the matrix need nothing of each other. A program has some of them, in registers, for all tokens of a sequence. So a
state is read and written once in a step, but for the ends of blocks.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.kernels.checks import next_power_of_2, require_shape
from kvrelay.kernels.recurrent.gates import softplus
from kvrelay.kernels.recurrent.ragged import DeltaInputs, RaggedStates, require_recurrence

_COLUMNS_OF_SINGLE_TOKENS = 16  # of a program: it mostly moves states
_COLUMNS = 8  # with more tokens: each waits for the one before it, so more programs share the work
_EPS = 1e-6  # of the squared lengths of keys and queries


def gated_delta_rule_reference(inputs: DeltaInputs, pool: torch.Tensor, states: RaggedStates) -> torch.Tensor:
    """The same contract as `gated_delta_rule`, in float64; reads numbers on the host."""
    num_heads, key_size, value_size = pool.shape[1:]
    keys = (inputs.mixed.shape[1] - num_heads * value_size) // 2
    parts = torch.split(inputs.mixed.double(), [keys, keys, num_heads * value_size], dim=1)
    query, key = (_of_length_one(part.reshape(states.num_tokens, -1, key_size), num_heads) for part in parts[:2])
    value, beta = parts[2].reshape(states.num_tokens, -1, value_size), inputs.beta.double().sigmoid()
    fading = F.softplus(inputs.decay.double() + inputs.decay_bias.double()) * inputs.log_rates.double().exp()
    out = torch.empty_like(value)
    token_starts, part_starts = states.token_starts.tolist(), states.part_starts.tolist()
    for seq in range(states.num_seqs):
        state = torch.zeros_like(pool[0]) if states.is_new[seq] else pool[states.read[seq]]
        for part in range(*part_starts[seq : seq + 2]):
            for token in range(*token_starts[part : part + 2]):
                state = state.double() * (-fading[token]).exp()[:, None, None]
                missing = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
                state = state + torch.einsum("hk,hv->hkv", key[token], missing * beta[token][:, None])
                out[token] = torch.einsum("hkv,hk->hv", state, query[token]) * key_size**-0.5
            pool[states.write[part]] = state.to(pool.dtype)
    return out.to(inputs.mixed.dtype)


def _of_length_one(vectors: torch.Tensor, num_heads: int) -> torch.Tensor:
    lengths = (vectors.square().sum(-1, keepdim=True) + _EPS).sqrt()
    return (vectors / lengths).repeat_interleave(num_heads // vectors.shape[1], dim=1)


@triton.jit(
    do_not_specialize_on_alignment=["decay_ptr", "beta_ptr", "is_new_ptr", "read_ptr", "write_ptr"],
)
@no_type_check
def _delta_rule_kernel(
    mixed_ptr,
    decay_ptr,
    beta_ptr,
    log_rates_ptr,
    decay_bias_ptr,
    pool_ptr,
    out_ptr,
    token_starts_ptr,
    part_starts_ptr,
    read_ptr,
    is_new_ptr,
    write_ptr,
    scale,
    mixed_stride_token,
    decay_stride_token,
    beta_stride_token,
    pool_stride_block,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
):
    """One program for some columns of one head's state of one sequence."""
    seq, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, KEY_PAD), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < KEY_SIZE, columns < VALUE_SIZE
    is_here = is_row[:, None] & is_column[None, :]
    in_block = (head * KEY_SIZE + rows[:, None]) * VALUE_SIZE + columns[None, :]
    num_keys: tl.constexpr = NUM_HEADS // HEADS_PER_KEY * KEY_SIZE
    queries = mixed_ptr + head // HEADS_PER_KEY * KEY_SIZE + rows
    values = mixed_ptr + 2 * num_keys + head * VALUE_SIZE + columns
    rate = tl.exp(tl.load(log_rates_ptr + head).to(tl.float32))
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)

    first_part, end_part = tl.load(part_starts_ptr + seq), tl.load(part_starts_ptr + seq + 1)
    last = tl.load(token_starts_ptr + end_part) - 1
    num_old_rows = KEY_SIZE * (1 - tl.load(is_new_ptr + seq).to(tl.int32))
    state = tl.load(
        pool_ptr + tl.load(read_ptr + seq) * pool_stride_block + in_block,
        mask=(rows < num_old_rows)[:, None] & is_column[None, :],
        other=0.0,
    )
    # A token's numbers are loaded while the one before it is computed.
    place = tl.load(token_starts_ptr + first_part).to(tl.int64)
    query = tl.load(queries + place * mixed_stride_token, mask=is_row, other=0.0)
    key = tl.load(queries + num_keys + place * mixed_stride_token, mask=is_row, other=0.0)
    value = tl.load(values + place * mixed_stride_token, mask=is_column, other=0.0)
    decay = tl.load(decay_ptr + place * decay_stride_token + head)
    beta = tl.load(beta_ptr + place * beta_stride_token + head)
    for part in range(first_part, end_part):
        for _ in range(tl.load(token_starts_ptr + part), tl.load(token_starts_ptr + part + 1)):
            next_place = tl.minimum(place + 1, last)
            next_query = tl.load(queries + next_place * mixed_stride_token, mask=is_row, other=0.0)
            next_key = tl.load(queries + num_keys + next_place * mixed_stride_token, mask=is_row, other=0.0)
            next_value = tl.load(values + next_place * mixed_stride_token, mask=is_column, other=0.0)
            next_decay = tl.load(decay_ptr + next_place * decay_stride_token + head)
            next_beta = tl.load(beta_ptr + next_place * beta_stride_token + head)

            asked, own = query.to(tl.float32), key.to(tl.float32)
            asked = asked * (scale / tl.sqrt(tl.sum(asked * asked, axis=0) + EPS))
            own = own / tl.sqrt(tl.sum(own * own, axis=0) + EPS)
            shifted = decay.to(tl.float32) + decay_bias
            softened = softplus(shifted)
            state = state * tl.exp(-rate * softened)
            missing = value.to(tl.float32) - tl.sum(state * own[:, None], axis=0)
            # What the query is told of the state before the replacement, and of the replacement: neither waits for the other.
            found = tl.sum(state * asked[:, None], axis=0)
            replaced = missing / (1.0 + tl.exp(-beta.to(tl.float32)))
            found += tl.sum(asked * own, axis=0) * replaced
            state = state + own[:, None] * replaced[None, :]
            tl.store(out_ptr + (place * NUM_HEADS + head) * VALUE_SIZE + columns, found, mask=is_column)
            place, query, key, value = next_place, next_query, next_key, next_value
            decay, beta = next_decay, next_beta
        tl.store(pool_ptr + tl.load(write_ptr + part) * pool_stride_block + in_block, state, mask=is_here)


def gated_delta_rule(inputs: DeltaInputs, pool: torch.Tensor, states: RaggedStates) -> torch.Tensor:
    """The outputs of all heads `[num_tokens, num_heads, value_size]`, contiguous, in the dtype of `mixed`; and the states.

    Args:
        inputs: see DeltaInputs. Queries and keys are divided by their lengths. `num_heads` is a multiple of `num_key_heads`, whose
            key serves as many heads that follow each other.
        pool: `[num_blocks, num_heads, key_size, value_size]` fp32, states; may be strided between blocks.
        states: where they are. States behind each part are written.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    of_tokens = {"decay": inputs.decay, "beta": inputs.beta}
    of_heads = {"log_rates": inputs.log_rates, "decay_bias": inputs.decay_bias}
    require_shape("pool", pool, ("num_blocks", "num_heads", "key_size", "value_size"))
    num_heads, key_size, value_size = pool.shape[1:]
    num_keys = require_recurrence(
        *(inputs.mixed, of_tokens, of_heads, pool, states), value_size=value_size, key_size=key_size
    )
    out = torch.empty((states.num_tokens, num_heads, value_size), dtype=inputs.mixed.dtype, device=inputs.mixed.device)
    is_single = states.num_seqs == states.num_tokens
    columns = min(_COLUMNS_OF_SINGLE_TOKENS if is_single else _COLUMNS, next_power_of_2(value_size))
    _delta_rule_kernel[(states.num_seqs, num_heads, triton.cdiv(value_size, columns))](
        *(inputs.mixed, inputs.decay, inputs.beta, inputs.log_rates, inputs.decay_bias, pool, out),
        *(
            states.token_starts,
            states.part_starts,
            states.read,
            states.is_new.view(torch.uint8),
            states.write,
            key_size**-0.5,
        ),
        *(inputs.mixed.stride(0), inputs.decay.stride(0), inputs.beta.stride(0), pool.stride(0)),
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_keys,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEY_PAD=next_power_of_2(key_size),
        COLUMNS=columns,
        EPS=_EPS,
        num_warps=1,
    )
    return out
