"""Tiny configurations of multimodal types: any decoder of text beside the smallest encoders of images and sounds.

Their classes are those of real checkpoints, so that a saved model has the tensors and names of one.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "encoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "encoder_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "model_patch_size": 14,
    "position_embedding_size": 16,
    "num_position_embeddings": 16,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "out_hidden_size": 64,
    "vision_output_dim": 64,
    "projection_dim": 64,
    "projector_input_dim": 32,
    "projector_output_dim": 64,
    "projector_hidden_size": 32,
    "output_dim": 64,
    "output_proj_dims": 32,
    "subsampling_conv_channels": [8, 8],
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
_NO_PLACEHOLDER = 500  # beyond the vocabulary: no token of a text stands for a part of an image
_MORE: dict[str, dict[str, Any]] = {
    name: {"vision_start_token_id": _NO_PLACEHOLDER} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
}


def text_type(model_type: str) -> str:
    """The type of a type's decoder of text; the type itself if it is nothing else."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
        found = config.get_text_config()
    except Exception:  # a configuration class may raise anything without fields
        return model_type
    return model_type if found is config else str(found.model_type)


def multimodal_config(model_type: str, text: dict[str, Any]) -> PreTrainedConfig:
    """The configuration with a decoder of the fields ``text``."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    fields: dict[str, Any] = {"tie_word_embeddings": text["tie_word_embeddings"]} | _MORE.get(model_type, {})
    for name, sub_class in config_class.sub_configs.items():
        sub = getattr(default, name, None) or (None if sub_class is transformers.AutoConfig else sub_class())
        if sub is default.get_text_config():
            fields[name] = {"model_type": sub.model_type, **text}
        elif sub is not None:
            own = {key: value for key, value in _TOWER.items() if key in sub.to_dict() or key in sub.attribute_map}
            fields[name] = {"model_type": sub.model_type, **own}
    for name in default.to_dict():
        if name.endswith(("_token_id", "_token_index")) and name not in text:
            fields[name] = _NO_PLACEHOLDER
    return config_class(**fields)
