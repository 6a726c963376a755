"""A layer's attention: by heads, or over latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.engine.config.latent import IndexerConfig, LatentConfig, QueryGrowth
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.rope import inverse_frequencies
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.ops import PLAIN, IndexQueries, LatentStep, Ops, Scores, StepContext
from kvrelay.engine.models.ranks import RankPart, summed
from kvrelay.engine.weights.parameters import HeadWeights, IndexerWeights, LatentWeights

Attention = Callable[[torch.Tensor, int, Any], torch.Tensor]
"""(``[num_tokens, hidden]``, layer, step) -> the same shape. Writes the step's K/V into the pool."""

_LATENT_EPS = 1e-6  # the norms of latents use this, whatever ``rms_norm_eps`` is


def make_attention(
    config: ModelConfig, weights: HeadWeights | LatentWeights, ops: Ops, part: RankPart | None, adapt: LayerAdapters
) -> Attention:
    """Takes over ``weights``. Adapters cannot change attention over latents."""
    if isinstance(weights, HeadWeights):
        return _Heads(config, weights, ops, part, adapt)
    assert config.latent is not None, f"{config.architecture} attends by heads"
    return _Latent(config, config.latent, weights, ops, part)


class _Heads:
    def __init__(
        self, config: ModelConfig, weights: HeadWeights, ops: Ops, part: RankPart | None, adapt: LayerAdapters
    ) -> None:
        self._config = config
        self._ops = ops
        self._qkv = adapt.qkv(ops.make_linear(weights.qkv, weights.qkv_bias))
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm  # [head_dim]
        self._scores = PLAIN if weights.sinks is None else Scores(sinks=weights.sinks)
        self._o = summed(adapt.o(ops.make_linear(weights.o, weights.o_bias)), part)

    def __call__(self, hidden: torch.Tensor, layer: int, step: StepContext) -> torch.Tensor:
        config, ops = self._config, self._ops
        qkv = self._qkv(hidden)
        query, key, value = qkv.split_with_sizes((config.q_size, config.kv_size, config.kv_size), dim=-1)
        query = query.view(-1, config.num_q_heads, config.head_dim)
        key = key.view(-1, config.num_kv_heads, config.head_dim)
        value = value.view(-1, config.num_kv_heads, config.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            query = ops.rms_norm(query, self._q_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, self._k_norm, config.rms_norm_eps)
        query = step.rotary_kv_write(query, key, value, layer)
        attended = step.attention(query, layer, self._scores)
        return self._o(attended.flatten(-2))


class _Latent:
    """A token keeps one latent, and a part of the key that all heads share. ``kv_b`` would expand the latent to each head's key and
    value.

    Instead, the matrix for keys is multiplied into the query (absorbed), and the matrix for values into the result. So attention
    reads the stored latents and expands nothing.

    With sparse attention a row of the pool also has the indexer's key. The indexer is asked only in steps in which some token sees
    more tokens than it picks.
    """

    def __init__(
        self, config: ModelConfig, latent: LatentConfig, weights: LatentWeights, ops: Ops, part: RankPart | None
    ) -> None:
        self._ops = ops
        self._latent = latent
        self._num_heads = config.num_q_heads
        self._q_a = None if weights.q_a is None else ops.make_linear(weights.q_a, None)
        self._q_a_norm = weights.q_a_norm
        self._q = ops.make_linear(weights.q, None)
        self._kv_a = ops.make_linear(weights.kv_a, None)
        self._kv_a_norm = weights.kv_a_norm
        of_heads = weights.kv_b.view(config.num_q_heads, latent.nope_size + latent.value_size, latent.rank)
        self._to_keys, self._to_values = of_heads.split_with_sizes((latent.nope_size, latent.value_size), dim=1)
        self._o = summed(ops.make_linear(weights.o, None), part)
        inv_freq, self._rope_factor = inverse_frequencies(config.rope, latent.rope_size)
        self._inv_freq = inv_freq.to(weights.kv_b.device)
        self._indexer: _Indexer | None = None
        if latent.indexer is not None and weights.indexer is not None:
            self._indexer = _Indexer(latent.indexer, latent.rope_size, weights.indexer, ops)

    def __call__(self, hidden: torch.Tensor, layer: int, step: LatentStep) -> torch.Tensor:
        latent, num_heads = self._latent, self._num_heads
        query_latents = self._query_latents(hidden)
        query = self._q(query_latents).view(-1, num_heads, latent.query_size)
        if latent.query_growth is not None:
            query = query * _growth(latent.query_growth, step.positions).to(query.dtype)[:, None, None]
        plain_query, rope_query = query.split_with_sizes((latent.nope_size, latent.rope_size), dim=-1)
        plain, rope_key = self._kv_a(hidden).split_with_sizes((latent.rank, latent.rope_size), dim=-1)
        plain = self._ops.rms_norm(plain.contiguous(), self._kv_a_norm, _LATENT_EPS)
        angles = step.positions[:, None].float() * self._inv_freq
        cos, sin = (part * self._rope_factor for part in (angles.cos(), angles.sin()))
        row = [plain, self._rotated(rope_key, cos, sin)]
        if self._indexer is not None:
            row.append(self._indexer.keys(hidden, cos, sin))
        elif latent.indexer is not None:  # all layers keep rows of one size, and no stale bytes may be handed over
            row.append(plain.new_zeros(len(plain), latent.indexer.size))
        step.latent_write(torch.cat(row, dim=-1), layer)
        if self._indexer is not None and step.longest > self._indexer.topk:
            step.pick(self._indexer.queries(query_latents, hidden, cos, sin), self._indexer.topk, layer)
        # Per head: [num_heads, num_tokens, nope_size] @ [num_heads, nope_size, rank]
        absorbed = torch.bmm(plain_query.transpose(0, 1), self._to_keys).transpose(0, 1)
        rotated = self._rotated(rope_query, cos[:, None], sin[:, None])
        attended = step.latent_attention(torch.cat((absorbed, rotated), dim=-1), layer, latent.score_scale)
        values = torch.bmm(attended.transpose(0, 1), self._to_values.mT).transpose(0, 1)
        return self._o(values.flatten(-2))

    def _query_latents(self, hidden: torch.Tensor) -> torch.Tensor:
        """What queries are made of."""
        if self._q_a is None or self._q_a_norm is None:
            return hidden
        return self._ops.rms_norm(self._q_a(hidden), self._q_a_norm, _LATENT_EPS)

    def _rotated(self, parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return _rotated(parts, cos, sin, is_interleaved=self._latent.is_interleaved)


class _Indexer:
    """Makes the keys and queries by which tokens to attend to are picked.

    DeepSeek's own code also multiplies both by a Hadamard matrix, which changes no product, and rounds them to fp8. As
    transformers, this does neither.
    """

    def __init__(self, config: IndexerConfig, rope_size: int, weights: IndexerWeights, ops: Ops) -> None:
        self.topk = config.topk
        self._config = config
        self._sizes = (rope_size, config.size - rope_size)
        self._q, self._k = ops.make_linear(weights.q, None), ops.make_linear(weights.k, None)
        self._k_norm, self._k_norm_bias = weights.k_norm, weights.k_norm_bias
        self._head_weights = weights.head_weights
        self._scale = (config.num_heads * config.size) ** -0.5

    def keys(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden]`` -> ``[num_tokens, size]``. ``cos``, ``sin``: ``[num_tokens, rope_size / 2]``."""
        keys = F.layer_norm(self._k(hidden), (self._config.size,), self._k_norm, self._k_norm_bias, _LATENT_EPS)
        return self._rotated(keys, cos, sin)

    def queries(
        self, query_latents: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> IndexQueries:
        """``query_latents`` ``[num_tokens, query_rank]``; the others as for ``keys``."""
        query = self._q(query_latents).view(-1, self._config.num_heads, self._config.size)
        weights = F.linear(hidden.float(), self._head_weights) * self._scale
        return IndexQueries(self._rotated(query, cos[:, None], sin[:, None]), weights)

    def _rotated(self, parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rope, rest = parts.split_with_sizes(self._sizes, dim=-1)
        return torch.cat((_rotated(rope, cos, sin, is_interleaved=self._config.is_interleaved), rest), dim=-1)


def _growth(growth: QueryGrowth, positions: torch.Tensor) -> torch.Tensor:
    """The factor on queries at ``positions`` ``[num_tokens]``, in float32."""
    return 1 + growth.beta * (positions.float() / growth.length).floor().log1p()


def _rotated(parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """Rotates the last dimension, computed in float32. Queries and keys get the same order of dimensions."""
    wide = parts.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if is_interleaved else wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(parts.dtype)
