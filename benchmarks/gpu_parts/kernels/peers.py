"""Other attention implementations on the same numbers: torch's SDPA and flex_attention, FlashInfer.

SDPA and flex_attention get contiguous keys and values, so they need no block table. FlashInfer reads kvrelay's pool directly; a
layer has the layout that it calls HND. A peer that is not installed, fails, or gives another result is reported as absent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpu_parts.frame.rows import Peer
from gpu_parts.frame.sizes import BLOCK_SIZE
from gpu_parts.frame.timing import Stopwatch
from gpu_parts.kernels.paged import PagedContext

_WORKSPACE_BYTES = 256 << 20
_MAX_DIFFERENCE = 2e-2  # relative, between two implementations in bf16
_BUDGET_S = 0.25
NO_TIME = "left out: the section's time was used up"


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of one layer. All contexts have one length, and the same number of queries at their end."""

    query: torch.Tensor  # [num_seqs * query_len, num_q_heads, head_dim], packed by sequence
    query_len: int
    paged: PagedContext

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return len(self.paged.lens)

    @property
    def context(self) -> int:
        """Tokens of each sequence, including the queries."""
        return self.paged.lens[0]

    @property
    def layer(self) -> torch.Tensor:
        """``[num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim]``, a view of the pool."""
        return self.paged.pool[:, self.paged.layer]


Call = Callable[[], torch.Tensor]
"""Computes ``[num_seqs * query_len, num_q_heads, head_dim]``."""

Attend = Callable[..., torch.Tensor]

Prepare = Callable[[Problem], Call]


def measure_peers(
    problem: Problem, ours: torch.Tensor, stopwatch: Stopwatch, *, may_compile: bool = True
) -> Iterator[Peer]:
    """Every peer's time, or why there is none. ``ours``: our result, with which theirs must agree.

    ``may_compile``: whether there is time for the peer that must be compiled.
    """
    for name, prepare in PEERS.items():
        if prepare is _flex and not may_compile:
            yield Peer(name, None, NO_TIME)
            continue
        try:
            yield _measured(name, prepare, problem, ours, stopwatch)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            yield Peer(name, None, f"{type(error).__name__}: {lines[0][:120]}")


def _measured(name: str, prepare: Prepare, problem: Problem, ours: torch.Tensor, stopwatch: Stopwatch) -> Peer:
    """Measure one peer. A separate function, so that its copy of all keys and values is freed before the next peer."""
    call = prepare(problem)
    difference = float((call().double() - ours.double()).norm() / ours.double().norm())
    if not difference <= _MAX_DIFFERENCE:
        return Peer(name, None, f"its result differs from ours by {difference:.1e}")
    return Peer(name, stopwatch.median_s(call, budget_s=_BUDGET_S))


def _gathered(problem: Problem) -> torch.Tensor:
    """Contiguous keys and values ``[2, num_seqs, num_kv_heads, context, head_dim]``."""
    _, heads, _, head_dim = problem.layer.shape[1:]
    shape = (2, problem.num_seqs, heads, problem.context, head_dim)
    result = torch.empty(shape, dtype=problem.query.dtype, device=problem.query.device)
    for index in range(problem.num_seqs):
        result[:, index] = problem.paged.keys_values(index)
    return result


def _batched_query(problem: Problem) -> torch.Tensor:
    """The query ``[num_seqs, num_q_heads, query_len, head_dim]``."""
    num_q_heads, head_dim = problem.query.shape[1:]
    return problem.query.view(problem.num_seqs, problem.query_len, num_q_heads, head_dim).transpose(1, 2)


def _packed(result: torch.Tensor) -> torch.Tensor:
    return result.transpose(1, 2).flatten(0, 1)


def _sdpa(problem: Problem) -> Call:
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415 - a peer's import is part of its absence

    query, (keys, values) = _batched_query(problem), _gathered(problem)
    if problem.query_len == 1:
        return lambda: _packed(F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
    if problem.query_len == problem.context:
        return lambda: _packed(F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True))
    # After a prefix the flash kernel aligns its mask as we do, but does not support groups of heads.
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    bias = causal_lower_right(problem.query_len, problem.context)
    return lambda: _packed(F.scaled_dot_product_attention(query, keys, values, attn_mask=bias))


@functools.cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Attend:
    """flex_attention, compiled at its call: two or three times for dynamic sizes, not for each of twenty problems.

    It raises an error where that fails, instead of computing without a kernel.
    """
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - as above

    attend: Attend = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return attend


def _flex(problem: Problem) -> Call:
    if problem.query.device.type != "cuda":
        raise RuntimeError("compiled for GPUs only")
    return flex_call(problem, compiled_flex())


def flex_call(problem: Problem, attend: Attend) -> Call:
    """Apply ``attend``, a flex_attention, to a problem."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 - as above

    query, (keys, values) = _batched_query(problem), _gathered(problem)
    if problem.query_len == 1:
        return lambda: _packed(attend(query, keys, values, enable_gqa=True))
    # A tensor, because a number would be compiled in.
    cached = torch.tensor(problem.context - problem.query_len, device=query.device)

    def is_visible(_batch: Any, _head: Any, position: Any, key: Any) -> Any:
        return position + cached >= key

    mask = create_block_mask(is_visible, None, None, problem.query_len, problem.context, device=query.device)
    return lambda: _packed(attend(query, keys, values, block_mask=mask, enable_gqa=True))


def _flashinfer(problem: Problem) -> Call:
    import flashinfer  # noqa: PLC0415 - as above

    device, lens = problem.query.device, problem.paged.lens
    num_q_heads, head_dim = problem.query.shape[1:]
    num_blocks = -(-problem.context // BLOCK_SIZE)
    indices = problem.paged.block_tables[:, :num_blocks].reshape(-1).contiguous()
    block_starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * num_blocks
    last_lens = torch.full((len(lens),), (problem.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    pages = (block_starts, indices, last_lens)
    sizes = (num_q_heads, problem.layer.shape[2], head_dim, BLOCK_SIZE)
    dtypes = {"q_data_type": problem.query.dtype, "kv_data_type": problem.layer.dtype}
    if problem.query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *sizes, **dtypes)
    else:
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * problem.query_len
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts, *pages, *sizes, causal=True, **dtypes)
    caches = (problem.layer[:, 0], problem.layer[:, 1])
    return functools.partial(wrapper.run, problem.query, caches)


PEERS: dict[str, Prepare] = {
    "SDPA, contiguous": _sdpa,
    "flex_attention, contiguous": _flex,
    "FlashInfer, paged": _flashinfer,
}
