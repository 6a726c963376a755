"""Our forward pass over a packed ragged batch, for all families (:mod:`kvrelay.engine.config.families`).

It has no state but the weights; K/V are in the pool.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.attention import Attention, make_attention
from kvrelay.engine.models.mlp import make_mlp
from kvrelay.engine.models.ops import LatentStep, Linear, Ops, StepContext, Upload
from kvrelay.engine.models.ranks import RankPart, embedding, gathered, summed
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.step.slots import Slots
from kvrelay.engine.weights.parameters import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer with its products."""

    input_norm: torch.Tensor  # [hidden]
    attention: Attention
    post_norm: torch.Tensor
    mlp: Linear


class Taps:
    """Keeps the inputs of a step's layers."""

    def __init__(self, layers: Collection[int]) -> None:
        """``layers``: the layers whose input is kept; the number of layers stands for the last layer's output."""
        self._layers = layers
        self.found: list[torch.Tensor] = []  # [num_tokens, hidden] each, in the layers' order

    def see(self, layer: int, residual: torch.Tensor) -> None:
        """Keep the input of ``layer``, which changes afterwards."""
        if layer in self._layers:
            self.found.append(residual.clone())


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
        """Takes over ``weights``: layers and head are removed from it one by one, as ``ops`` converts them to the form it
        multiplies with.

        ``part``: the part of the model that ``config`` and ``weights`` describe; None: the whole. ``adapters``: the adapters, and
        the config of the whole model; None: there are none.
        """
        self._config = config
        self.dtype, self.device = weights.dtype, weights.layers[0].input_norm.device
        self._ops = ops
        self._line = None if part is None else part.line
        cut = Cut() if part is None else part.cut
        vocab_size, embed, head = config.vocab_size, weights.embed, weights.lm_head
        self._look_up = embedding(embed, vocab_size, part) if cut.is_first and embed is not None else None
        self.embeds_with_ranks = cut.num_ranks > 1  # whether ``embed`` is a collective
        self._norm = weights.norm
        self._lm_head = None if head is None else gathered(ops.make_linear(head, None), vocab_size, part)
        weights.lm_head = head = None  # otherwise an untied head would be in memory twice while the layers follow
        weights.layers.reverse()
        changed_by, whole = adapters or (None, config)
        self._first = cut.layers(config.num_layers).start
        self._layers = [
            make_layer(config, weights.layers.pop(), ops, part, LayerAdapters(changed_by, whole, cut, index))
            for index in cut.layers(config.num_layers)
        ]

    def encode(self, plan: StepPlan, slots: Slots) -> None:
        """See Model. There are no images."""

    def begin_step(self, batch: Batch, slots: Slots, upload: Upload) -> None:
        """See Model. Our own layers take token ids only."""
        if batch.rotary_positions is not None or batch.last_seen is not None:
            raise ValueError(f"a step with images; {self._config.architecture} reads text only")

    def forward(
        self, token_ids: torch.Tensor, step: StepContext | LatentStep, taps: Taps | None = None
    ) -> torch.Tensor | None:
        """Hidden states after the last norm: ``token_ids`` ``[num_tokens]`` -> ``[num_tokens, hidden]``.

        A stage receives hidden states from the stage before, and sends them to the next one; None if it is not the last. Side
        effect: writes the K/V of every token into the pool. ``taps`` get the layers' inputs.
        """
        ops, layers, eps = self._ops, self._layers, self._config.rms_norm_eps
        residual = self.embed(token_ids)
        if taps is not None:
            taps.see(self._first, residual)
        hidden = ops.rms_norm(residual, layers[0].input_norm, eps)
        for place, layer in enumerate(layers):
            hidden = layer.attention(hidden, self._first + place, step)
            hidden = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = layer.mlp(hidden)
            norm = self._norm if place + 1 == len(layers) else layers[place + 1].input_norm
            if norm is None:
                assert self._line is not None, "a model without its norm is a stage"
                self._line.send(residual.add_(hidden))
                return None
            hidden = ops.add_rms_norm(hidden, residual, norm, eps)
            if taps is not None:
                taps.see(self._first + place + 1, residual)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` in the model's dtype. Pass only the rows that sample. For the last stage only."""
        assert self._lm_head is not None, "only the last stage has logits"
        return self._lm_head(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input here, ``[num_tokens, hidden]``."""
        if self._look_up is not None:
            return self._look_up(token_ids)
        assert self._line is not None, "a model without its embedding is a stage"
        norm = self._layers[0].input_norm
        return self._line.receive(torch.empty(len(token_ids), len(norm), dtype=norm.dtype, device=norm.device))


def make_layer(
    config: ModelConfig, weights: LayerWeights, ops: Ops, part: RankPart | None, adapt: LayerAdapters
) -> Layer:
    """Takes over ``weights``. ``config``, ``part``: see DecoderModel."""
    return Layer(
        input_norm=weights.input_norm,
        attention=make_attention(config, weights.attention, ops, part, adapt),
        post_norm=weights.post_norm,
        mlp=_normed(
            summed(make_mlp(config, weights.mlp, ops, adapt), part), weights.mlp_norm, config.rms_norm_eps, ops
        ),
    )


def _normed(linear: Linear, norm: torch.Tensor | None, eps: float, ops: Ops) -> Linear:
    """``linear`` with a norm of its results, if there is one."""
    return linear if norm is None else lambda hidden: ops.rms_norm(linear(hidden), norm, eps)
