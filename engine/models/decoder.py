"""Our forward pass over a packed ragged batch, for all families (:mod:`kvrelay.engine.config.families`).

No state but weights; K/V live in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.attention import Attention, make_attention
from kvrelay.engine.models.mlp import make_mlp
from kvrelay.engine.models.ops import LatentStep, Linear, Ops, StepContext
from kvrelay.engine.models.ranks import RankPart, embedding, gathered, summed
from kvrelay.engine.weights.parameters import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, its products ready to run."""

    input_norm: torch.Tensor  # [hidden]
    attention: Attention
    post_norm: torch.Tensor
    mlp: Linear


class DecoderModel:
    """Runs one step's tokens through all layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        part: RankPart | None = None,
        adapters: tuple[Adapters, ModelConfig] | None = None,
    ) -> None:
        """Takes ``weights`` over: layers and head leave it one by one, as ``ops`` brings them into the form it multiplies with.

        ``part``: which one ``config`` and ``weights`` are of the model; None: it is whole. ``adapters``: which the model's products
        are to add, and the configuration of the whole model; None: none ever.
        """
        self._config = config
        self._ops = ops
        self._embed = weights.embed
        self._look_up = embedding(weights.embed, config.vocab_size, part)
        self._norm = weights.norm
        self._lm_head = gathered(ops.make_linear(weights.lm_head, None), config.vocab_size, part)
        weights.lm_head = weights.embed  # else a head of its own would be there twice while the layers follow
        weights.layers.reverse()
        cut = Cut() if part is None else part.cut
        changed_by, whole = adapters or (None, config)
        self._layers = [
            _make_layer(config, weights.layers.pop(), ops, part, LayerAdapters(changed_by, whole, cut, index))
            for index in range(config.num_layers)
        ]

    def forward(self, token_ids: torch.Tensor, step: StepContext | LatentStep) -> torch.Tensor:
        """Hidden states behind the last norm. ``token_ids`` ``[num_tokens]`` -> ``[num_tokens, hidden]``.

        Side effect: K/V of every token are written into the pool.
        """
        ops, layers, eps = self._ops, self._layers, self._config.rms_norm_eps
        residual = self._look_up(token_ids)
        hidden = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            hidden = layer.attention(hidden, index, step)
            hidden = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = layer.mlp(hidden)
            is_last = index + 1 == len(layers)
            hidden = ops.add_rms_norm(hidden, residual, self._norm if is_last else layers[index + 1].input_norm, eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` in the model's dtype. Call it with the rows that sample only."""
        return self._lm_head(hidden)


def _make_layer(
    config: ModelConfig, weights: LayerWeights, ops: Ops, part: RankPart | None, adapt: LayerAdapters
) -> _Layer:
    return _Layer(
        input_norm=weights.input_norm,
        attention=make_attention(config, weights.attention, ops, part, adapt),
        post_norm=weights.post_norm,
        mlp=summed(make_mlp(config, weights.mlp, ops, adapt), part),
    )
