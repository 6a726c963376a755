"""Norms, rotation with the write into the pool, activation and penalties against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.comparing import compared, identical
from gpu_parts.kernel_names import Kernel
from gpu_parts.paged import random_pool
from gpu_parts.running import Context, Finding
from gpu_parts.sizes import BLOCK_SIZE
from kvrelay.kernels import NewTokens, add_rms_norm, apply_penalties, rms_norm, rotary_kv_write, silu_mul

_EPS = 1e-5


def check_norm(context: Context) -> Iterator[Finding]:
    """Over the hidden size, alone and with the residual; and over heads."""
    shape, rows, generator = context.sizes.shape, context.sizes.check_rows, context.generator()
    hidden, residual = (_randn(context, generator, rows, shape.hidden_size) for _ in range(2))
    weight = _randn(context, generator, shape.hidden_size)
    yield from compared(Kernel.NORM, "hidden", rms_norm(hidden, weight, _EPS), _normed(hidden, weight))
    total = (residual + hidden).clone()
    result = add_rms_norm(hidden, residual, weight, _EPS)
    yield identical(Kernel.NORM, "residual", residual, total)
    yield from compared(Kernel.NORM, "hidden and residual", result, _normed(total, weight))
    heads = _randn(context, generator, rows, shape.num_q_heads + 2, shape.head_dim)[:, : shape.num_q_heads]
    weight = _randn(context, generator, shape.head_dim)
    yield from compared(Kernel.NORM, "heads, strided", rms_norm(heads, weight, _EPS), _normed(heads, weight))


def check_activation(context: Context) -> Iterator[Finding]:
    """``silu(gate) * up``, its first factor rounded as in a model of separate operations."""
    shape, generator = context.sizes.shape, context.generator()
    gate_up = _randn(context, generator, context.sizes.check_rows, 2 * shape.intermediate_size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * gate.sigmoid()).to(context.dtype).double() * up
    yield from compared(Kernel.ACTIVATION, "gate and up", silu_mul(gate_up), expected)


def check_rotary(context: Context) -> Iterator[Finding]:
    """Queries are rotated in place, keys and values land in their slots, and nothing else changes."""
    sizes, shape, generator = context.sizes, context.sizes.shape, context.generator()
    rows, layer, half = sizes.check_rows, shape.num_layers - 1, shape.head_dim // 2
    pool = random_pool(shape, sizes.check_blocks, shape.num_layers, context.dtype, generator)
    qkv = _randn(context, generator, rows, shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim)
    query, key, value = qkv.split_with_sizes((shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    angles = torch.rand(shape.max_positions, half, device=context.device, generator=generator) * 6.3
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(shape.max_positions, (rows,), device=context.device, generator=generator)
    num_slots = sizes.check_blocks * BLOCK_SIZE
    slots = torch.randperm(num_slots, device=context.device, generator=generator)[:rows]
    before, rotated_query, rotated_key = qkv.clone(), *(_rotated(x, cos, sin, positions) for x in (query, key))
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    untouched = torch.ones(num_slots, dtype=torch.bool, device=context.device)
    untouched[slots] = False
    others = pool[:, layer].transpose(2, 3).transpose(1, 2).flatten(0, 1)[untouched]  # [slots, 2, heads, dim]
    other_layer = pool[:, 0].clone()
    rotary_kv_write(query, key, value, cos, sin, positions, pool, layer, slots)
    written = pool[:, layer].transpose(2, 3).transpose(1, 2).flatten(0, 1)
    yield from compared(Kernel.ROTARY, "queries", query, rotated_query)
    yield from compared(Kernel.ROTARY, "keys in the pool", pool[blocks, layer, 0, :, offsets], rotated_key)
    yield identical(Kernel.ROTARY, "values in the pool", pool[blocks, layer, 1, :, offsets], value)
    yield identical(Kernel.ROTARY, "slots of others", written[untouched], others)
    yield identical(Kernel.ROTARY, "another layer", pool[:, 0], other_layer)
    yield identical(Kernel.ROTARY, "keys and values given", qkv[:, shape.num_q_heads :], before[:, shape.num_q_heads :])


def check_penalties(context: Context) -> Iterator[Finding]:
    """Named entries change as they should, all others not at all; the device counts a token as the host would."""
    (num_rows, vocab), generator, device = context.sizes.sampling_batches[0], context.generator(), context.device
    logits = torch.randn(num_rows, vocab, device=device, generator=generator) * 4
    entries = torch.randperm(num_rows * vocab, device=device, generator=generator)[: num_rows * vocab // 50 + 5]
    rows, tokens = entries // vocab, entries % vocab
    counts = torch.randint(4, (len(entries),), device=device, generator=generator).int()
    repetition, presence, frequency = (torch.rand(num_rows, device=device, generator=generator) + 0.5 for _ in range(3))
    before = logits.clone()
    apply_penalties(logits, rows, tokens, counts, repetition, presence, frequency)
    values, factor = before[rows, tokens].double(), repetition[rows].double()
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[rows].double() * counts + presence[rows].double() * (counts > 0)
    yield from compared(Kernel.PENALTIES, "entries", logits[rows, tokens][None], values[None])
    is_other = torch.ones_like(logits, dtype=torch.bool)
    is_other[rows, tokens] = False
    yield identical(Kernel.PENALTIES, "all others", logits[is_other], before[is_other])
    # Of each row's first entry one occurrence is new: the only one, which has no entry then, or one of two.
    order = rows.argsort(stable=True)
    rows, tokens, counts = rows[order], tokens[order], counts[order]
    starts = torch.searchsorted(rows, torch.arange(num_rows + 1, device=device))
    firsts = starts[:-1][starts[1:] > starts[:-1]]
    counts[firsts] = 1 + torch.arange(len(firsts), device=device).int() % 2  # of one occurrence, and of two
    by_host, by_device = before.clone(), before.clone()
    apply_penalties(by_host, rows, tokens, counts, repetition, presence, frequency)
    new_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
    num_new = torch.zeros(num_rows, dtype=torch.int32, device=device)
    new_tokens[rows[firsts]], num_new[rows[firsts]] = tokens[firsts], 1
    counts[firsts] -= 1
    is_known = torch.ones_like(rows, dtype=torch.bool)
    is_known[firsts] = counts[firsts] > 0
    rows, tokens, counts = rows[is_known], tokens[is_known], counts[is_known]
    starts = torch.searchsorted(rows, torch.arange(num_rows + 1, device=device)).int()
    new = NewTokens(new_tokens, num_new, starts)
    apply_penalties(by_device, rows, tokens, counts, repetition, presence, frequency, new)
    yield identical(Kernel.PENALTIES, "counted on the device", by_device, by_host)


def _randn(context: Context, generator: torch.Generator, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=context.device, generator=generator).to(context.dtype)


def _normed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = hidden.double()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
    return normalised.to(hidden.dtype).double() * weight.double()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    first, second = x.double().chunk(2, dim=-1)
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)
