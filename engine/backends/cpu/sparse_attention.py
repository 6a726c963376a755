"""Attention over the latents that an indexer picks (DSA: DeepSeek-V3.2, 2025), on the CPU.

A token that sees more than ``topk`` tokens attends to ``topk`` of them, and reads only their rows of the pool. The first ones of a
sequence attend to all that they see. Sequences are computed one by one, and their tokens in chunks, which bounds the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.models.ops import IndexQueries
from kvrelay.engine.step.batch import Batch

_CHUNK_NUMBERS = 2**22  # fp32 numbers of one chunk's scores or gathered latents


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One row of the batch."""

    tokens: slice  # its tokens in the batch; the first ones attend to all that they see
    num_before: int  # tokens of its context before them
    blocks: torch.Tensor  # [num_blocks] of the context
    picked: torch.Tensor  # [num_picking, topk] positions, of its last tokens


class PickedLatents:
    """What the tokens of a step attend to, in all layers up to the next indexer."""

    def __init__(self, batch: Batch, kv: GroupKv, group: int, index: IndexQueries, topk: int, place: int) -> None:
        """``kv``: the group's rows; those of layer ``place`` in it end with the keys that ``index`` is multiplied with."""
        self._rows = kv.keys  # [num_blocks, num_layers, 1, block_size, row_size]
        self._block_size = kv.block_size
        keys = self._rows[:, place, 0, :, -index.query.shape[-1] :]
        tables, starts = batch.block_tables(group), batch.query_start_loc.tolist()
        self._sequences = []
        for number, seq_len in enumerate(batch.seq_lens.tolist()):
            tokens = slice(starts[number], starts[number + 1])
            blocks = torch.from_numpy(tables[number, : -(-seq_len // self._block_size)])
            num_picking = max(0, min(tokens.stop - tokens.start, seq_len - topk))
            picking = slice(tokens.stop - num_picking, tokens.stop)
            picked = torch.empty(0, topk, dtype=torch.int64)
            if num_picking:
                of_sequence = keys[blocks].flatten(0, 1)[:seq_len].float()
                picked = _picked(index.query[picking], index.weights[picking], of_sequence, topk)
            num_before = seq_len - (tokens.stop - tokens.start)
            self._sequences.append(_Sequence(tokens, num_before, blocks, picked))

    def attend(self, query: torch.Tensor, place: int, scale: float, out: torch.Tensor) -> None:
        """Attend with ``query`` ``[num_tokens, num_q_heads, size]`` over layer ``place``. Scores, softmax and sums are fp32.

        Writes every row of ``out`` ``[num_tokens, num_q_heads, rank]``.
        """
        num_heads, size = query.shape[1:]
        latents = self._rows[:, place, 0, :, :size]
        for sequence in self._sequences:
            first_picking = sequence.tokens.stop - len(sequence.picked)
            self._attend_all(sequence, slice(sequence.tokens.start, first_picking), latents, query, scale, out)
            count = max(1, _CHUNK_NUMBERS // (sequence.picked.shape[1] * max(size, num_heads)))
            for first in range(0, len(sequence.picked), count):
                chosen = sequence.picked[first : first + count]
                tokens = slice(first_picking + first, first_picking + first + len(chosen))
                found = latents[sequence.blocks[chosen // self._block_size], chosen % self._block_size].float()
                scores = torch.bmm(query[tokens].float(), found.mT).mul_(scale)
                out[tokens] = torch.bmm(scores.softmax(-1), found[..., : out.shape[-1]]).to(out.dtype)

    def _attend_all(
        self,
        sequence: _Sequence,
        tokens: slice,
        latents: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """``tokens``: the sequence's first ones in the batch, which attend to all that they see."""
        num_tokens = tokens.stop - tokens.start
        seen = sequence.num_before + num_tokens
        if not num_tokens:
            return
        found = latents[sequence.blocks[: -(-seen // self._block_size)]].flatten(0, 1)[:seen].float()
        count = max(1, _CHUNK_NUMBERS // (seen * query.shape[1]))
        for first in range(0, num_tokens, count):
            end = min(first + count, num_tokens)
            of_chunk = slice(tokens.start + first, tokens.start + end)
            scores = (query[of_chunk].float() @ found.T).mul_(scale)  # [count, num_q_heads, seen]
            scores.masked_fill_(_hidden(sequence.num_before + first, end - first, seen)[:, None], -torch.inf)
            out[of_chunk] = (scores.softmax(-1) @ found[:, : out.shape[-1]]).to(out.dtype)


def _picked(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions ``[n, topk]`` of the highest scores for the last ``n`` tokens of a sequence, all of which see more than ``topk``.

    ``query`` ``[n, num_heads, size]``, ``weights`` ``[n, num_heads]``, ``keys`` ``[seq_len, size]`` fp32.
    """
    (num_tokens, num_heads, size), seq_len = query.shape, len(keys)
    count = max(1, _CHUNK_NUMBERS // (num_heads * seq_len))
    picked = []
    for first in range(0, num_tokens, count):
        part = query[first : first + count].float()
        products = (part.reshape(-1, size) @ keys.T).relu_().view(len(part), num_heads, seq_len)
        scores = torch.bmm(weights[first : first + count, None], products)[:, 0]
        ranks = ranked(scores).masked_fill_(
            _hidden(seq_len - num_tokens + first, len(part), seq_len), torch.iinfo(torch.int64).min
        )
        picked.append(ranks.topk(topk, dim=-1).indices)
    return torch.cat(picked)


def ranked(scores: torch.Tensor) -> torch.Tensor:
    """int64 numbers in the order of fp32 ``scores`` ``[n, num_positions]``; of equal scores, the first position has the highest.

    ``topk`` of floats would take any of several equal ones. Scores are often equal: 0, where no head has a positive product.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    in_order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    return (in_order.long() << 32) | (0x7FFFFFFF - positions)


def _hidden(first_position: int, count: int, seq_len: int) -> torch.Tensor:
    """Whether each of ``count`` consecutive tokens does not see a position, ``[count, seq_len]``."""
    return torch.arange(seq_len) > torch.arange(first_position, first_position + count)[:, None]
