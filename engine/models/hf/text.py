"""Multimodal types of transformers: what of them computes with text, and what sees and hears.

Such a model consists of a decoder of text, its head, and *towers*: encoders of images and sounds, and what brings their outputs to
the decoder. A tower runs only if a request has an image or a sound. Only engines that read images keep them
(:mod:`kvrelay.engine.models.hf.images`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvrelay.common.errors import ModelError

_BASE = "model."  # prefix of names
_MARK_FIELDS = ("_token_id", "_token_index")  # ends of names of a config's fields
_MARKS = "kvrelay_marks"  # attribute of a multimodal type's config of text


def auto_class(config: PreTrainedConfig) -> Any:
    """The Auto class of transformers whose models of ``config`` generate text. Raises ModelError if there is none."""
    for mapping, auto in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
    ):
        if type(config) in mapping:
            return auto
    raise ModelError(f"transformers generates no text with models of type {config.model_type}: not served")


def text_model(config: PreTrainedConfig, **how: Any) -> PreTrainedModel:
    """A model of ``config`` without towers, with new weights. ``how``: for transformers' ``from_config``. Raises as auto_class."""
    model: PreTrainedModel = auto_class(config).from_config(config, **how)
    drop_towers(model)
    return model


def full_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a multimodal type with its towers."""
    found: type[PreTrainedModel] = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return found


def text_class_name(config: PreTrainedConfig) -> str:
    """The name of the class that serves text of a checkpoint. It is the same with towers and without. Raises as auto_class."""
    is_causal = auto_class(config) is AutoModelForCausalLM
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_MULTIMODAL_LM_MAPPING
    return str(mapping[type(config)].__name__)


def text_class(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class for a checkpoint of ``config``, and the part of ``config`` that it takes.

    Of a multimodal type it makes no towers, and loading passes over their tensors. Raises as auto_class.
    """
    is_causal = auto_class(config) is AutoModelForCausalLM
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_MULTIMODAL_LM_MAPPING
    model_class = mapping[type(config)]
    if not is_multimodal(config):
        return model_class, config
    with torch.device("meta"):
        towers = drop_towers(MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config))

    def make(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        drop_towers(self)

    # A class for the text alone sees the names in the checkpoint, which may lack the base's prefix.
    paths = [re.escape(path.removeprefix(_BASE)) for path in towers]
    ignored = [*(model_class._keys_to_ignore_on_load_unexpected or ()), *(rf"^({_BASE})?{path}\." for path in paths)]
    # By a class's name and module transformers knows how to read its checkpoints.
    members = {"__init__": make, "__module__": model_class.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    without_towers = type(model_class.__name__, (model_class,), members)
    takes_part = model_class.config_class is config.sub_configs.get("text_config")
    if not takes_part:
        return without_towers, config
    part = config.get_text_config()
    setattr(part, _MARKS, sorted(mark_tokens(config)))
    return without_towers, part


def mark_tokens(config: PreTrainedConfig) -> set[int]:
    """Tokens of a multimodal type that may stand for images and sounds: it treats them in a way of its own, also without any.

    ``config`` may be what :func:`text_class` gives.
    """
    if not is_multimodal(config):
        return set(getattr(config, _MARKS, ()))
    fields = config.to_dict().items()
    return {value for name, value in fields if name.endswith(_MARK_FIELDS) and isinstance(value, int)}


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether a type has a decoder of text beside other parts."""
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and config.get_text_config() is not config


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """What computes with tokens in a multimodal model, without the head; any other model itself."""
    part: PreTrainedModel = model.get_decoder() if is_multimodal(model.config) else model
    return part


def text_decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The path and the module of what makes hidden states of tokens."""
    part = text_part(model)
    if part is model:
        name = decoder_name(model)
        return name, getattr(model, name)
    return next((path, one) for path, one in model.named_modules() if one is part)


def decoder_name(model: PreTrainedModel) -> str:
    """The name of the child that makes hidden states. Llama 4's base is another one, the image model's."""
    children: dict[str, nn.Module] = dict(model.named_children())
    if model.base_model_prefix in children:
        return str(model.base_model_prefix)
    return next(name for name, child in children.items() if isinstance(child, PreTrainedModel))


def towers_of(model: PreTrainedModel) -> list[tuple[nn.Module, str, str]]:
    """The towers of a multimodal model, each as (its parent, its name there, its path); none of any other model."""
    if not is_multimodal(model.config):
        return []
    kept = {model.get_decoder(), model.get_output_embeddings()}
    parents = [
        (path, one) for path, one in model.named_modules() if one not in kept and not kept.isdisjoint(one.modules())
    ]
    return [
        (parent, name, f"{path}.{name}".removeprefix("."))
        for path, parent in parents
        for name, child in parent.named_children()
        if kept.isdisjoint(child.modules())
    ]


def drop_towers(model: PreTrainedModel) -> list[str]:
    """Replace the towers of a multimodal model by None, as transformers does where a checkpoint has none. Gives their names."""
    towers = towers_of(model)
    for parent, name, _ in towers:
        setattr(parent, name, None)
    return [path for _, _, path in towers]
