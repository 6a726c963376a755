"""A layer's attention: by heads, or over latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvrelay.engine.config.latent import LatentConfig
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.rope import inverse_frequencies
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.ops import PLAIN, LatentStep, Ops, Scores, StepContext
from kvrelay.engine.models.ranks import RankPart, summed
from kvrelay.engine.weights.parameters import HeadWeights, LatentWeights

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

    def __call__(self, hidden: torch.Tensor, layer: int, step: LatentStep) -> torch.Tensor:
        latent, num_heads = self._latent, self._num_heads
        query = self._queries(hidden).view(-1, num_heads, latent.query_size)
        plain_query, rope_query = query.split_with_sizes((latent.nope_size, latent.rope_size), dim=-1)
        plain, rope_key = self._kv_a(hidden).split_with_sizes((latent.rank, latent.rope_size), dim=-1)
        plain = self._ops.rms_norm(plain.contiguous(), self._kv_a_norm, _LATENT_EPS)
        angles = step.positions[:, None].float() * self._inv_freq
        cos, sin = (part * self._rope_factor for part in (angles.cos(), angles.sin()))
        step.latent_write(torch.cat((plain, self._rotated(rope_key, cos, sin)), dim=-1), layer)
        # Per head: [num_heads, num_tokens, nope_size] @ [num_heads, nope_size, rank]
        absorbed = torch.bmm(plain_query.transpose(0, 1), self._to_keys).transpose(0, 1)
        rotated = self._rotated(rope_query, cos[:, None], sin[:, None])
        attended = step.latent_attention(torch.cat((absorbed, rotated), dim=-1), layer, latent.score_scale)
        values = torch.bmm(attended.transpose(0, 1), self._to_values.mT).transpose(0, 1)
        return self._o(values.flatten(-2))

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._q_a is None or self._q_a_norm is None:
            return self._q(hidden)
        return self._q(self._ops.rms_norm(self._q_a(hidden), self._q_a_norm, _LATENT_EPS))

    def _rotated(self, parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates the last dimension, computed in float32. Queries and keys get the same order of dimensions."""
        wide = parts.float()
        first, second = (wide[..., 0::2], wide[..., 1::2]) if self._latent.is_interleaved else wide.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(parts.dtype)
