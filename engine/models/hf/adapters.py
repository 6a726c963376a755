"""Finds out at load which linear layers of a transformers model adapters may change.

An adapter names a layer by its module's path, and adds to the product row by row: row i must be token i of the step. So a layer
qualifies if plain forward passes call it once each, with all tokens. Experts get some of the tokens, and the head gets the rows
that sample, so they do not qualify.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.engine.models.adapters import AdaptedLayer, Adapters
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.parts import Adapt, is_linear, linear_shape
from kvrelay.engine.models.hf.ranks.ranges import LinearCut
from kvrelay.engine.models.hf.text import text_decoder
from kvrelay.engine.models.ops import Linear

_NUM_TOKENS = [29, 17]  # tokens of each pass: so many that no expert gets all of them in both


@torch.inference_mode()
def adaptable_layers(model: TransformersModel, whole: PreTrainedModel) -> dict[str, AdaptedLayer]:
    """The layers by name. Runs ``model`` with transformers' own layers: call it before ``bind``.

    ``model`` may be a rank's part of ``whole``, whose parameters may be on "meta". It runs without the other ranks: its numbers are
    wrong then, but each layer gets the same rows.
    """
    decoder = f"{text_decoder(model.model)[0]}."
    modules = {name: module for name, module in model.model.named_modules() if name.startswith(decoder)}
    # A recurrent layer sees the step's tokens part by part.
    inside = {one for recurrent in model.recurrent for one in recurrent.modules()}
    linears = {name: module for name, module in modules.items() if is_linear(module) and module not in inside}
    rows: dict[str, list[int]] = {name: [] for name in linears}  # of each call

    def hear(name: str) -> Any:
        def called(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows[name].append(inputs[0].numel() // inputs[0].shape[-1])

        return called

    hooks = [module.register_forward_pre_hook(hear(name)) for name, module in linears.items()]
    try:
        with model.plain_attention():
            for count in _NUM_TOKENS:
                positions = torch.arange(count, device=model.model.device)[None]
                token_ids = positions % model.shape.vocab_size
                model.model(input_ids=token_ids, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    qualified = [name for name in linears if rows[name] == _NUM_TOKENS]
    shapes = {name: linear_shape(whole.get_submodule(name)) for name in qualified}
    return {
        name: AdaptedLayer(name, num_outputs, num_inputs, range(num_outputs), range(num_inputs))
        for name, (num_outputs, num_inputs) in shapes.items()
    }


def adapt_layers(adapters: Adapters, layers: Mapping[str, AdaptedLayer], cuts: Mapping[str, LinearCut]) -> Adapt:
    """A function that makes products of ``layers`` which adapters can change. ``cuts``: of this rank."""

    def adapt(linear: Linear, names: tuple[str, ...]) -> Linear:
        if not all(name in layers for name in names):
            return linear
        return adapters.adapted(linear, *(part for name in names for part in _parts(layers[name], cuts.get(name))))

    return adapt


def _parts(layer: AdaptedLayer, cut: LinearCut | None) -> list[AdaptedLayer]:
    """What a rank has of a layer, range by range."""
    if cut is None:
        return [layer]
    if cut.by_outputs:
        return [replace(layer, outputs=one) for one in cut.ranges]
    return [replace(layer, inputs=one) for one in cut.ranges]
