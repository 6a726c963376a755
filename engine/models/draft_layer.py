"""The forward pass of a layer that a checkpoint brings for drafting (multi-token prediction, MTP).

At each place of a text it takes the model's hidden state behind its last norm, and the token that follows, and guesses the token
behind that one (DeepSeek-V3, 2024, section 2.2). Embedding and head are the model's.

For a further guess the layer is applied again: what its own last norm gives takes the place of the model's hidden state, as in
SGLang's ``deepseek_nextn.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.decoder import DecoderModel, make_layer
from kvrelay.engine.models.ops import LatentStep, Ops, StepContext
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.weights.parameters import DraftLayerWeights


class DraftLayer:
    """Implements :class:`kvrelay.engine.models.guesser.Guesser`. K/V are in a pool of its own, in layer 0.

    Of several ranks each has its part, as of the model's layers. All of them guess together.
    """

    taps: frozenset[int] = frozenset()
    token_ids = None

    def __init__(
        self, config: ModelConfig, weights: DraftLayerWeights, ops: Ops, target: DecoderModel, part: RankPart | None
    ) -> None:
        """Takes over ``weights``. ``config``: of the layer (:func:`kvrelay.engine.config.draft_layer.draft_layer`), or of a rank's
        ``part`` of it. ``target``: the model, on the same rank.
        """
        self.vocab_size = config.vocab_size
        self.width = config.hidden_size
        self.has_collectives = part is not None and part.cut.num_ranks > 1
        self._eps = config.rms_norm_eps
        self._ops = ops
        self._target = target
        self._embed_norm, self._hidden_norm, self._norm = weights.embed_norm, weights.hidden_norm, weights.norm
        self._fuse = ops.make_linear(weights.fuse, None)
        self._layer = make_layer(config, weights.layer, ops, part, LayerAdapters(None, config, Cut(), 0))

    def fuse(self, taps: Seq[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """See Guesser."""
        return hidden

    def write(self, fused: torch.Tensor, token_ids: torch.Tensor, step: StepContext | LatentStep) -> None:
        """See Guesser. Also attends, which costs little beside a step of the model."""
        self._attend(fused, token_ids, step)

    def forward(
        self, fused: torch.Tensor, token_ids: torch.Tensor, step: StepContext | LatentStep, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Guesser."""
        ops, layer = self._ops, self._layer
        residual, attended = (part[last] for part in self._attend(fused, token_ids, step))
        hidden = ops.add_rms_norm(attended, residual, layer.post_norm, self._eps)
        hidden = ops.add_rms_norm(layer.mlp(hidden), residual, self._norm, self._eps)
        return hidden, self._target.logits(hidden)

    def _attend(
        self, fused: torch.Tensor, token_ids: torch.Tensor, step: StepContext | LatentStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input, and what its attention adds to it, both ``[num_tokens, hidden]``. Side effect: writes K/V."""
        ops, eps = self._ops, self._eps
        embedded = ops.rms_norm(self._target.embed(token_ids), self._embed_norm, eps)
        both = torch.cat((embedded, ops.rms_norm(fused, self._hidden_norm, eps)), dim=-1)
        residual = self._fuse(both)
        return residual, self._layer.attention(ops.rms_norm(residual, self._layer.input_norm, eps), 0, step)
