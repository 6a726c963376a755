"""A deep model and a draft model of one layer that predicts it exactly: the deep model's further layers add nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.conftest import SIZES, save_model


def save_pair(deep: Path, shallow: Path, num_layers: int, **sizes: Any) -> None:
    """Save both models in existing directories. Their outputs are bit-identical where rows are computed alike."""
    config = {**SIZES, **sizes}
    save_model(deep, transformers.LlamaConfig(**{**config, "num_hidden_layers": num_layers}))
    model = transformers.AutoModelForCausalLM.from_pretrained(deep)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(deep)
    first = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "num_hidden_layers": 1}))
    first.load_state_dict(model.state_dict(), strict=False)
    first.save_pretrained(shallow)
