"""Tiny models that read images, as whole directories: weights, tokenizer, chat template, and what prepares images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from tests.tokenizer_files import save_tokenizer

from .tiny import fill
from .tiny_image_kinds import KINDS, VOCAB

_TEXT = "what is in the picture and what is not , says a user to the assistant who looks at it : red green blue"
_COMMON = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
_TEMPLATE = (
    "{%% for message in messages %%}<{{ message.role }}>"
    "{%% if message.content is string %%}{{ message.content }}{%% else %%}"
    "{%% for part in message.content %%}{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}{%% endfor %%}"
    "{%% endif %%}<eos>{%% endfor %%}{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)


def image_types() -> list[str]:
    """The types that ``save_image_model`` knows."""
    return sorted(KINDS)


def image_config(model_type: str, ids: dict[str, int]) -> PreTrainedConfig:
    """The tiny configuration of a type. ``ids``: of its special tokens."""
    made = KINDS[model_type].config(ids)
    if isinstance(made, PreTrainedConfig):
        return made
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**made, tie_word_embeddings=False)
    return config


def save_image_config(model_type: str, directory: Path) -> None:
    """Save the tiny configuration of a type alone."""
    special_tokens = [*_COMMON, *KINDS[model_type].special_tokens]
    image_config(model_type, {token: index for index, token in enumerate(special_tokens)}).save_pretrained(directory)


def save_image_model(model_type: str, directory: Path, seed: int = 1) -> PreTrainedModel:
    """Save a model with random weights in float32, with all files that a deployment needs, and return it.

    Images become few tokens: at most 20 with ``smolvlm``, at most 36 with Qwen's types. ``<eos>`` ends an output.
    """
    kind = KINDS[model_type]
    special_tokens = [*_COMMON, *kind.special_tokens]
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(directory, VOCAB, special_tokens, _TEXT, _TEMPLATE % kind.mark)
    tokens = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    tokens["tokenizer_class"] = "PreTrainedTokenizerFast"
    config = image_config(model_type, {token: index for index, token in enumerate(special_tokens)})
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    fill(model, seed)
    # No output has a placeholder: some types compute it in a way of their own.
    model.get_output_embeddings().weight.data[len(_COMMON)] = 0
    model.save_pretrained(directory)
    for name, content in (
        ("tokenizer_config.json", tokens | {"extra_special_tokens": kind.tokenizer}),
        ("preprocessor_config.json", kind.preprocessor),
        ("processor_config.json", kind.processor),
    ):
        (directory / name).write_text(json.dumps(content))
    made: PreTrainedModel = model
    return made
