"""The layer of a checkpoint that drafts (multi-token prediction, MTP: DeepSeek-V3, 2024), as a model of one layer.

It is behind the ``num_hidden_layers`` that compute the model, and has the sizes of the last one of these.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig


def with_draft_layer(model: ModelConfig) -> ModelConfig:
    """The config of a model whose layer for drafting is loaded, too. Raises ModelError unless the checkpoint has exactly one."""
    if model.num_draft_layers != 1:
        raise ModelError(
            f"--speculation is mtp; config.json of this {model.architecture} has 'num_nextn_predict_layers' "
            f"{model.num_draft_layers}, and one layer for drafting is needed: take --speculation ngram, draft-model or head"
        )
    return replace(model, has_draft_layer=True)


def draft_layer(model: ModelConfig) -> ModelConfig:
    """The layer for drafting, as layer 0 of a model. It has experts if the model's last layer has some, and an indexer of its own.

    ``model``: the whole one.
    """
    last = model.num_layers - 1
    experts, latent = model.experts, model.latent
    if experts is not None:
        experts = replace(experts, layers=frozenset({0})) if last in experts.layers else None
    if latent is not None and latent.indexer is not None:
        latent = replace(latent, indexer=replace(latent.indexer, layers=frozenset({0})))
    return replace(
        model,
        num_layers=1,
        sliding_windows=model.sliding_windows[last:],
        experts=experts,
        latent=latent,
        num_draft_layers=0,
        has_draft_layer=False,
    )
