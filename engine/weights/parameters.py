"""A model's parameters. :mod:`kvrelay.engine.weights.places` maps a checkpoint's tensors to them.

Matrices have the form that the model computes with: q, k and v in one, gate and up in one, a layer's experts stacked. If a model is
cut among ranks (:mod:`kvrelay.engine.config.cut`), only the rank's part is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.weights.rounding import AnyWeight, Weight


@dataclass(slots=True)
class MlpWeights:
    """Two products with an activation between them. Biases are None if the model has none."""

    gate_up: AnyWeight  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: AnyWeight  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The same for each expert that is here. The experts' matrices are stacked."""

    num_experts: int
    gate_up: AnyWeight  # [num_experts * width, hidden]; the activation turns ``width`` numbers into ``intermediate``
    gate_up_bias: torch.Tensor | None  # [num_experts * width]
    down: AnyWeight  # [num_experts * hidden, intermediate]
    down_bias: torch.Tensor | None  # [num_experts * hidden]


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """A layer's experts with their router."""

    router: torch.Tensor  # [num_experts, hidden]
    router_bias: torch.Tensor | None
    choice_bias: torch.Tensor | None  # [num_experts] fp32, added to scores when experts are chosen
    experts: ExpertWeights
    shared: MlpWeights | None  # an MLP that also computes all tokens
    first_expert: int = 0  # number of the first expert that is here; other ranks have the others


@dataclass(slots=True)
class HeadWeights:
    """Attention by heads, or a rank's heads of it. Biases and q/k norms are None if the model has none."""

    qkv: AnyWeight  # [q_size + 2 * kv_size, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None  # [num_q_heads]
    o: AnyWeight  # [hidden, q_size]
    o_bias: torch.Tensor | None


@dataclass(slots=True)
class IndexerWeights:
    """What picks the latents to attend to (:class:`kvrelay.engine.config.latent.IndexerConfig`); every rank has all of it."""

    q: AnyWeight  # [num_heads * size, query_rank]
    k: AnyWeight  # [size, hidden]
    k_norm: torch.Tensor  # [size]
    k_norm_bias: torch.Tensor  # [size]
    head_weights: torch.Tensor  # [num_heads, hidden] fp32


@dataclass(slots=True)
class LatentWeights:
    """Attention over latents (:class:`kvrelay.engine.config.latent.LatentConfig`), or a rank's query heads of it."""

    q_a: AnyWeight | None  # [query_rank, hidden]; None: queries are made of the hidden state
    q_a_norm: torch.Tensor | None  # [query_rank]
    q: AnyWeight  # [num_q_heads * query_size, query_rank or hidden]
    kv_a: AnyWeight  # [rank + rope_size, hidden]
    kv_a_norm: torch.Tensor  # [rank]
    kv_b: torch.Tensor  # [num_q_heads * (nope_size + value_size), rank], never quantised
    o: AnyWeight  # [hidden, num_q_heads * value_size]
    indexer: IndexerWeights | None = None


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer, or a rank's part of it.

    Of several ranks, only the first has the biases of ``o`` and ``down``, because products are summed over ranks.
    """

    input_norm: torch.Tensor  # [hidden]
    attention: HeadWeights | LatentWeights
    post_norm: torch.Tensor  # [hidden]
    mlp: MlpWeights | SparseWeights
    mlp_norm: torch.Tensor | None  # [hidden], of what ``mlp`` gives; None: there is none


@dataclass(slots=True)
class DraftLayerWeights:
    """A layer that drafts (:mod:`kvrelay.engine.models.draft_layer`), or a rank's part of it: of ``layer``; the rest is whole."""

    embed_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor  # [hidden]
    fuse: AnyWeight  # [hidden, 2 * hidden]: of the token that follows, then of the hidden state
    layer: LayerWeights
    norm: torch.Tensor  # [hidden]


@dataclass(slots=True)
class ModelWeights:
    """All weights. ``lm_head`` is ``embed`` itself if they are tied.

    A rank's ``embed`` and ``lm_head`` have ``Cut.vocab_part`` rows, with zeros after the vocabulary's end. A stage has its own
    layers; :class:`kvrelay.engine.config.cut.Cut` says which rank has what else.
    """

    embed: torch.Tensor | None  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor | None  # [hidden]
    lm_head: Weight | None  # [vocab, hidden]
    draft: DraftLayerWeights | None = None  # if ``ModelConfig.has_draft_layer``

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return self.layers[0].input_norm.dtype
