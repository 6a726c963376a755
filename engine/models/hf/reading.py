"""Makes the reader of images for a checkpoint, without its weights; or says why its images cannot be read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.images.processor import load_processor
from kvrelay.engine.images.reader import Encoding, ProcessorReader
from kvrelay.engine.models.hf.images import encoder_inputs, encoding_part
from kvrelay.engine.models.hf.loading import load_full_config
from kvrelay.engine.models.hf.text import full_class, is_multimodal

_PLACEHOLDERS = ("image_token_id", "image_token_index")  # fields of configs


def make_reader(directory: Path) -> ProcessorReader:
    """The reader for the checkpoint in ``directory``. Raises ModelError with the reason why there is none."""
    config = load_full_config(directory)
    if not is_multimodal(config):
        raise ModelError("the model reads text only")
    processor = load_processor(directory, config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = full_class(config)(config)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        encoding = Encoding(
            placeholder=placeholder_of(config),
            inputs=encoder_inputs(model),
            takes_whole=_takes_whole(model),
            rope=_rope_of(model),
        )
    except ModelError:
        raise
    except Exception as error:  # a model's own code and a broken file may raise anything
        raise ModelError(f"{directory}: {type(error).__name__}: {error}") from error
    return ProcessorReader(processor, tokenizer, encoding)


def placeholder_of(config: PreTrainedConfig) -> int:
    """The token that stands for a part of an image. Raises ModelError if there is none that a prompt can have."""
    found = next((one for name in _PLACEHOLDERS if isinstance(one := getattr(config, name, None), int)), None)
    if found is None:
        raise ModelError(f"config.json of type {config.model_type} names no token for images")
    vocab_size = int(config.get_text_config().vocab_size)
    if not 0 <= found < vocab_size:
        raise ModelError(f"its token for images is {found}, outside of its vocabulary of {vocab_size}")
    return found


def _takes_whole(model: PreTrainedModel) -> bool:
    """Whether the tokens of an image see each other: in Gemma 3 always, and in Gemma 4 if its config says so."""
    asked = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    return asked == "vision" or "token_type_ids" in inspect.signature(model.forward).parameters


class _Rope:
    """Positions by axes, as the model's own code finds them. It needs no weights."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._takes = frozenset(inspect.signature(index).parameters)

    def __call__(
        self, prompt: torch.Tensor, is_placeholder: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        """See Rope."""
        given: dict[str, torch.Tensor] = {
            **inputs,
            "input_ids": prompt[None],
            "mm_token_type_ids": is_placeholder[None].long(),
        }
        given["attention_mask"] = torch.ones_like(prompt[None])
        positions, offset = self._index(**{name: one for name, one in given.items() if name in self._takes})
        return positions[:, 0], int(offset.reshape(-1)[0])


def _rope_of(model: PreTrainedModel) -> _Rope | None:
    index = getattr(encoding_part(model), "get_rope_index", None)
    return None if index is None else _Rope(index)
