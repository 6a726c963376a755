"""Attention over the latents that an indexer picks, on a GPU (DSA: DeepSeek-V3.2, 2025).

What is picked becomes a list of rows of the pool for each token. The kernels over latents read it as a block table with blocks of
one token: single tokens by splits, tokens of prompts as prompts of one token. All layers up to the next indexer use the same lists.
"""

from __future__ import annotations

import torch

from kvrelay.engine.backends.cuda.inputs import StepInputs
from kvrelay.engine.models.ops import IndexQueries
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.index_scores import highest_rows, index_scores
from kvrelay.kernels.attention.latent import latent_decode_attention, latent_prefill_attention

_MOST_SCORES = 2**22  # of 8 bytes, at a time
_MOST_TOKENS = 2**15  # of prompts in a launch, whose grid has at most 65,535 of them


class PickedRows:
    """What the tokens of a step attend to. Nothing here waits for the device, and single tokens take launches that only depend on
    their number and on ``StepInputs.longest``: a graph can hold them.
    """

    def __init__(
        self,
        inputs: StepInputs,
        block_tables: torch.Tensor,
        index: IndexQueries,
        topk: int,
        pool: torch.Tensor,
        place: int,
    ) -> None:
        """``block_tables`` ``[num_rows, max_blocks]``: of the group of layers. ``place``: the layer's, in the group."""
        self._split = inputs.num_decode_rows
        visible = torch.cat((inputs.seq_lens[: self._split], inputs.positions[self._split :].int() + 1))
        self._counts = visible.clamp(max=topk)
        rows = [torch.empty(0, topk, dtype=torch.int32, device=pool.device)]

        def pick(first: int, end: int, tables: torch.Tensor, longest: int) -> None:
            tokens = slice(first, end)
            ranks = torch.empty(end - first, longest, dtype=torch.int64, device=pool.device)
            index_scores(index.query[tokens], index.weights[tokens], pool, place, tables, visible[tokens], ranks)
            rows.append(highest_rows(ranks, tables, topk, pool))

        count = max(1, _MOST_SCORES // max(inputs.longest, 1))
        for first in range(0, self._split, count):
            end = min(first + count, self._split)
            pick(first, end, block_tables[first:end], inputs.longest)
        token = self._split
        for row, (num_tokens, seq_len) in enumerate(inputs.prompts, start=self._split):
            longest = max(seq_len, topk)  # a shorter list has places that nobody reads
            count = max(1, _MOST_SCORES // longest)
            for first in range(token, token + num_tokens, count):
                pick(first, min(first + count, token + num_tokens), block_tables[row : row + 1], longest)
            token += num_tokens
        self._rows = torch.cat(rows)  # [num_tokens, topk], in layer 0

    def attend(
        self,
        query: torch.Tensor,
        pool: torch.Tensor,
        place: int,
        scale: float,
        workspace: DecodeWorkspace,
        out: torch.Tensor,
    ) -> None:
        """Attend with ``query`` ``[num_tokens, num_q_heads, size]`` over layer ``place``.

        Writes every row of ``out`` ``[num_tokens, num_q_heads, rank]``. ``workspace``: as for `latent_decode_attention`.
        """
        block_size, row_size = pool.shape[4:]
        of_layer = pool.view(-1, 1, 1, 1, 1, row_size)[place * block_size :]
        rank, split = out.shape[2], self._split
        if split:
            latent_decode_attention(
                query[:split],
                of_layer,
                0,
                self._rows[:split],
                self._counts[:split],
                rank=rank,
                scale=scale,
                workspace=workspace,
                out=out[:split],
            )
        for first in range(split, len(query), _MOST_TOKENS):
            tokens = slice(first, first + _MOST_TOKENS)
            num_tokens = len(query[tokens])
            latent_prefill_attention(
                query[tokens],
                of_layer,
                0,
                self._rows[tokens],
                torch.arange(num_tokens + 1, dtype=torch.int32, device=query.device),
                self._counts[tokens],
                rank=rank,
                scale=scale,
                max_query_len=1,
                out=out[tokens],
            )
