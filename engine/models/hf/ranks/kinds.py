"""Which first layers of a model have one of each kind. They are enough to see whether ranks compute the model that was loaded.

A plan to cut a model names a layer's parts by patterns, which are the same for all layers. So layers of a kind are right or wrong
together.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from kvrelay.common.errors import ModelError
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.outline import NoWeights
from kvrelay.engine.models.hf.text import is_multimodal, text_decoder

logger = logging.getLogger(__name__)

_PLACES = ("idx", "index", "id", "number")  # ends of names of a layer's place among the others
_WITH_IMAGES = 4  # layers that a multimodal model has at least: features of images may go into early ones


def first_of_each_kind(outline: TransformersModel) -> tuple[str, int] | None:
    """The path of the list of layers, and how many it takes until each kind is among them.

    None if the model does not run with its first layers alone. ``outline``: on "meta"; it is left as it was.
    """
    path = _list_of_layers(outline)
    if path is None:
        return None
    layers: Any = outline.model.get_submodule(path)
    kinds = [_kind(outline, layer) for layer in layers]
    count = 1 + max(kinds.index(kind) for kind in kinds)
    if is_multimodal(outline.model.config):
        count = min(len(kinds), max(count, _WITH_IMAGES))
    try:
        with outline.first_layers(path, count), NoWeights():
            facts = [replace(one, temperature=None) for one in probe_layers(outline.model, count).attention]
            expected = [replace(one, temperature=None) for one in outline.layers]
    except ModelError as error:
        logger.info("the check at load takes all layers: %s", error)
        return None
    finally:
        outline.use_our_attention()
    return (path, count) if facts == expected else None


def _list_of_layers(outline: TransformersModel) -> str | None:
    """The path of the outermost list that has all attention and all recurrent layers."""
    _, decoder = text_decoder(outline.model)
    inside = set(decoder.modules())
    keepers = {*(layer.module for layer in outline.layers), *outline.recurrent}
    lists = ((path, one) for path, one in outline.model.named_modules() if isinstance(one, nn.ModuleList))
    return next((str(path) for path, one in lists if one in inside and keepers <= set(one.modules())), None)


def _kind(outline: TransformersModel, layer: nn.Module) -> object:
    """What tells layers of one kind from others."""
    inside = set(layer.modules())
    attention = [
        replace(one, module=None, shared_with=None if one.shared_with is None else 0)  # type: ignore[arg-type]
        for one in outline.layers
        if one.module in inside
    ]
    states = [
        tensors for module, tensors in zip(outline.recurrent, outline.shape.states, strict=True) if module in inside
    ]
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    return attention, states, shapes, {name: _switches(module) for name, module in layer.named_modules()}


def _switches(module: nn.Module) -> dict[str, object]:
    """Words and switches that a model's code sets, such as whether a layer rotates queries."""
    return {
        name: value
        for name, value in vars(module).items()
        if (isinstance(value, str) or (isinstance(value, int) and value in (0, 1)))
        and not name.startswith("_")
        and not name.endswith(_PLACES)
    }
