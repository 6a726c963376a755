"""Models with a layer for drafting (MTP): random ones, one that predicts its model exactly, and a reference over transformers.

transformers ignores such layers. Here the decoder layer is the one layer of another small model of the same type, so that the
reference shares no code with ours.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.models.tiny import EXPERTS, LATENT, SIZES

_FILE = "model.safetensors"


def save_with_draft_layer(directory: Path, model_type: str, *, is_dense: bool = False, **fields: Any) -> ReferenceLayer:
    """Save a random model of a type with such layers in float32, with its layer for drafting, in an existing directory.

    ``is_dense``: no layer has experts. ``fields``: of its config.json.
    """
    sizes = {**SIZES, **EXPERTS, **LATENT, "num_nextn_predict_layers": 1, **fields}
    if is_dense:
        sizes["first_k_dense_replace"] = sizes["num_hidden_layers"]
    target = _random(model_type, 5, **sizes)
    target.save_pretrained(directory)
    own = {**sizes, "num_hidden_layers": 1, "first_k_dense_replace": int(is_dense), "mlp_layer_types": None}
    if model_type in {"glm4_moe_lite", "glm_moe_dsa"}:
        own["mlp_layer_types"] = ["dense" if is_dense else "sparse"]
    layer = _random(model_type, 6, **own)
    hidden, number = sizes["hidden_size"], sizes["num_hidden_layers"]
    generator = torch.Generator().manual_seed(8)
    extra = {
        "enorm.weight": torch.rand(hidden, generator=generator) + 0.5,
        "hnorm.weight": torch.rand(hidden, generator=generator) + 0.5,
        "eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5,
    }
    with tempfile.TemporaryDirectory() as place:
        layer.save_pretrained(place)
        saved = load_file(Path(place) / _FILE)
    prefix = f"model.layers.{number}."
    tensors = load_file(directory / _FILE)
    tensors |= {
        name.replace("model.layers.0.", prefix): tensor
        for name, tensor in saved.items()
        if name.startswith("model.layers.0.")
    }
    tensors |= {f"{prefix}{name}": tensor for name, tensor in extra.items()}
    tensors[f"{prefix}shared_head.norm.weight"] = layer.model.norm.weight.detach().clone()
    # Copies, as published checkpoints have them.
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / _FILE, metadata={"format": "pt"})
    return ReferenceLayer(target, layer, extra)


def save_known_layer(directory: Path, mistakes: float = 0.0, **fields: Any) -> None:
    """Save a model whose layers add nothing, so that its last token alone decides, and whose layer for drafting predicts that.

    ``mistakes``: the size of an error in the product that the layer begins with.
    """
    save_with_draft_layer(directory, "deepseek_v3", **fields)
    tensors = load_file(directory / _FILE)
    number = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    prefix = f"model.layers.{number}."
    hidden = len(tensors[f"{prefix}enorm.weight"])
    error = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(9))
    tensors[f"{prefix}eh_proj.weight"] = torch.eye(hidden, 2 * hidden) + mistakes * error
    tensors[f"{prefix}enorm.weight"] = torch.ones(hidden)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / _FILE, metadata={"format": "pt"})


class ReferenceLayer:
    """The reference for a layer's drafts: float32, one text at a time, without caches, blocks and batches."""

    def __init__(self, target: Any, layer: Any, extra: dict[str, torch.Tensor]) -> None:
        self._target, self._layer, self._extra = target, layer, extra
        self._eps = target.config.rms_norm_eps

    @torch.inference_mode()
    def draft(self, token_ids: Seq[int], first: int, num_tokens: int) -> tuple[int, ...]:
        """The likeliest ``num_tokens`` tokens after ``token_ids``. The model computed the tokens from ``first`` to the
        last but one."""
        hidden = self._target.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0, first:]
        behind = list(token_ids[first + 1 :])
        drafted: list[int] = []
        for _ in range(num_tokens):
            embedded = self._norm(self._target.get_input_embeddings()(torch.tensor(behind)), "enorm")
            both = torch.cat((embedded, self._norm(hidden, "hnorm")), dim=-1) @ self._extra["eh_proj.weight"].T
            last = self._layer.model(inputs_embeds=both[None]).last_hidden_state[0, -1:]  # behind shared_head.norm
            drafted.append(int(self._target.lm_head(last).argmax()))
            behind.append(drafted[-1])
            hidden = torch.cat((hidden, last))
        return tuple(drafted)

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(states, states.shape[-1:], self._extra[f"{name}.weight"], self._eps)


def _random(model_type: str, seed: int, **fields: Any) -> Any:
    given = {name: value for name, value in fields.items() if value is not None or name == "eos_token_id"}
    config = CONFIG_MAPPING[model_type](**given)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", ".bias")):
                tensor.normal_(0, 0.3)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    return model.eval()
