"""The config of an EAGLE-3 head (Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", 2025).

A head has its own directory: one decoder layer of the Llama kind, which reads the model's hidden states, and an output over a part
of the model's vocabulary. There are two forms: the sizes are at the top of ``config.json``, or in its ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig, parse_config, read_config

_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and switches of a head for a certain model."""

    layer: ModelConfig  # its one layer as a model of one layer; its vocabulary is the model's
    taps: tuple[
        int, ...
    ]  # the model's layers whose input it reads, in order; the number of layers stands for the last layer's output
    target_hidden_size: int  # the model's
    draft_vocab_size: int
    norms_residual: bool  # whether the residual is the normed hidden state


def load_head_config(directory: Path, model: ModelConfig) -> HeadConfig:
    """Read the head's ``config.json``. Raises ModelError if it is no head, or one for another model than ``model``."""
    top = read_config(directory)
    config = {**top, **(top.get("transformer_layer_config") or {})}
    draft_vocab_size = config.get("draft_vocab_size")
    if not isinstance(draft_vocab_size, int):
        raise ModelError(f"{directory}: config.json has no 'draft_vocab_size'; it is no EAGLE-3 head")
    if (num_layers := config.get("num_hidden_layers", 1)) != 1:
        raise ModelError(f"{directory}: the head has {num_layers} layers; only heads of one are supported")
    layer = parse_config({**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}, str(directory))
    if layer.vocab_size != model.vocab_size or not 0 < draft_vocab_size <= model.vocab_size:
        raise ModelError(
            f"{directory}: the head drafts {draft_vocab_size} of {layer.vocab_size} tokens, and the model has "
            f"{model.vocab_size}: it is another model's"
        )
    target_hidden_size = config.get("target_hidden_size") or model.hidden_size
    if target_hidden_size != model.hidden_size:
        raise ModelError(
            f"{directory}: the head reads hidden states of {target_hidden_size}, and the model has {model.hidden_size}: it is "
            "another model's"
        )
    return HeadConfig(
        layer=layer,
        taps=_taps(config, model.num_layers, directory),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        norms_residual=bool(config.get("norm_before_residual", False)),
    )


def _taps(config: Mapping[str, Any], num_layers: int, directory: Path) -> tuple[int, ...]:
    """The layers that the head reads. By default, as in the paper: an early, a middle and a late one. ``eagle_config`` names layers
    by their output.
    """
    named = (config.get("eagle_config") or {}).get(_TAPS)
    if named is not None:
        named = [index + 1 for index in named if isinstance(index, int)]
    taps = named or config.get(_TAPS) or [2, num_layers // 2, num_layers - 3]
    if not all(isinstance(index, int) and 0 <= index <= num_layers for index in taps) or len(set(taps)) < len(taps):
        raise ModelError(
            f"{directory}: the head reads what layers {taps} are given, and the model has {num_layers} layers: it is another "
            "model's"
        )
    return tuple(sorted(taps))
