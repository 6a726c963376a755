"""The forward pass of an EAGLE-3 head: one decoder layer over the model's hidden states and the next tokens.

At each place of a text, the layer takes the model's fused hidden states there, and the token that follows. Where the model has not
been yet, the layer's output takes the place of the next fused states (Li et al. 2025, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.head import HeadConfig
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.mlp import make_mlp
from kvrelay.engine.models.ops import Linear, Ops, StepContext
from kvrelay.engine.weights.head import DraftHeadWeights


class HeadModel:
    """Implements :class:`kvrelay.engine.models.guesser.Guesser`. K/V are in the head's own pool, in layer 0."""

    has_collectives = False

    def __init__(self, config: HeadConfig, weights: DraftHeadWeights, ops: Ops, embed: Linear) -> None:
        """``embed``: the model's embedding, ``[n]`` -> ``[n, hidden]``, for heads without their own."""
        self.taps = frozenset(config.taps)
        self.vocab_size, self.width = config.layer.vocab_size, config.layer.hidden_size
        self.token_ids = weights.token_ids
        self._layer = config.layer
        self._norms_residual = config.norms_residual
        self._ops = ops
        self._embed_norm, self._hidden_norm = weights.embed_norm, weights.hidden_norm
        self._post_norm, self._norm = weights.post_norm, weights.norm
        own = weights.embed
        self._embed = embed if own is None else lambda token_ids: own[token_ids]
        self._fuse = ops.make_linear(weights.fuse, None)
        self._qkv = ops.make_linear(weights.attention.qkv, None)
        self._o = ops.make_linear(weights.attention.o, None)
        self._mlp = make_mlp(config.layer, weights.mlp, ops, LayerAdapters(None, config.layer, Cut(), 0))
        self._lm_head = ops.make_linear(weights.lm_head, None)

    def fuse(self, taps: Seq[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """See Guesser. ``taps``: ``[num_tokens, target_hidden]`` each."""
        return self._fuse(torch.cat(tuple(taps), dim=-1))

    def write(self, fused: torch.Tensor, token_ids: torch.Tensor, step: StepContext) -> None:
        """See Guesser."""
        self._queries(self._normed(fused), token_ids, step)

    def forward(
        self, fused: torch.Tensor, token_ids: torch.Tensor, step: StepContext, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Guesser."""
        ops, eps = self._ops, self._layer.rms_norm_eps
        normed = self._normed(fused)
        query = self._queries(normed, token_ids, step)
        attended = step.attention(query, 0)[last].flatten(-2)
        residual = (normed if self._norms_residual else fused)[last]
        hidden = ops.add_rms_norm(self._o(attended), residual, self._post_norm, eps)
        hidden = ops.add_rms_norm(self._mlp(hidden), residual, self._norm, eps)
        return residual, self._lm_head(hidden)

    def _normed(self, fused: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(fused, self._hidden_norm, self._layer.rms_norm_eps)

    def _queries(self, normed: torch.Tensor, token_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The rotated queries. Side effect: writes keys and values."""
        layer = self._layer
        embedded = self._ops.rms_norm(self._embed(token_ids), self._embed_norm, layer.rms_norm_eps)
        qkv = self._qkv(torch.cat((embedded, normed), dim=-1))
        query, key, value = (
            part.view(len(token_ids), -1, layer.head_dim)
            for part in qkv.split_with_sizes((layer.q_size, layer.kv_size, layer.kv_size), dim=-1)
        )
        return step.rotary_kv_write(query, key, value, 0)
