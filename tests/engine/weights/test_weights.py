"""Whole and sharded checkpoints: their weights, device, dtype, and digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import load_config
from kvrelay.engine.weights.checkpoint import load_weights, weights_digest
from kvrelay.engine.weights.parameters import ModelWeights
from tests.engine.conftest import SIZES, save_model

from .conftest import CPU, Device, edit, load


def test_projections_are_packed_in_order(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    weights, theirs = load(directory), model.state_dict()
    prefix = "model.layers.1."
    qkv = torch.cat([theirs[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    torch.testing.assert_close(weights.layers[1].attention.qkv, qkv, rtol=0, atol=0)
    gate_up = torch.cat([theirs[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    torch.testing.assert_close(weights.layers[1].mlp.gate_up, gate_up, rtol=0, atol=0)
    assert torch.equal(weights.lm_head, theirs["lm_head.weight"])


def test_shards_give_the_same_weights_in_any_dtype(llama: tuple[Path, Any], sharded: Path) -> None:
    whole, parts = load(llama[0], torch.bfloat16), load(sharded, torch.bfloat16)
    assert torch.equal(whole.layers[2].mlp.down, parts.layers[2].mlp.down)
    assert parts.embed.dtype == torch.bfloat16


MODELS: dict[str, Any] = {
    "untied": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**SIZES),
}


def expected(directory: Path, num_layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters by hand: all files are read, joined and then converted."""
    held: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        held |= load_file(path)
    joined: dict[str, torch.Tensor] = {
        "embed": held["model.embed_tokens.weight"],
        "norm": held["model.norm.weight"],
        "lm_head": held.get("lm_head.weight", held["model.embed_tokens.weight"]),
    }
    fields = {
        "input_norm": ["input_layernorm.weight"],
        "post_norm": ["post_attention_layernorm.weight"],
        "qkv": [f"self_attn.{part}_proj.weight" for part in "qkv"],
        "qkv_bias": [f"self_attn.{part}_proj.bias" for part in "qkv"],
        "q_norm": ["self_attn.q_norm.weight"],
        "k_norm": ["self_attn.k_norm.weight"],
        "o": ["self_attn.o_proj.weight"],
        "o_bias": ["self_attn.o_proj.bias"],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "gate_up_bias": ["mlp.gate_proj.bias", "mlp.up_proj.bias"],
        "down": ["mlp.down_proj.weight"],
        "down_bias": ["mlp.down_proj.bias"],
    }
    for index in range(num_layers):
        for field, names in fields.items():
            parts = [held.get(f"model.layers.{index}.{name}") for name in names]
            if parts[0] is not None:
                joined[f"{index}.{field}"] = torch.cat([part for part in parts if part is not None])
    return {name: tensor.to(dtype) for name, tensor in joined.items()}


def parameters(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """The parameters under the names of ``expected``."""
    ends = {"embed": weights.embed, "norm": weights.norm, "lm_head": weights.lm_head}
    named = {name: tensor for name, tensor in ends.items() if isinstance(tensor, torch.Tensor)}
    for index, layer in enumerate(weights.layers):
        fields = {
            field: getattr(part, field) for part in (layer, layer.attention, layer.mlp) for field in part.__slots__
        }
        named |= {f"{index}.{field}": tensor for field, tensor in fields.items() if isinstance(tensor, torch.Tensor)}
    return named


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_a_device_and_the_cpu_get_the_same_bits(
    opened: Device, tmp_path: Path, model: str, shard_size: str, held: torch.dtype, wanted: torch.dtype
) -> None:
    save_model(tmp_path, MODELS[model], shard_size=shard_size, dtype=held)
    there = load(tmp_path, wanted)
    assert opened.largest_nbytes == opened.peak_nbytes > 0  # one of the file's tensors at a time
    assert opened.live_nbytes == 0
    by_hand = expected(tmp_path, SIZES["num_hidden_layers"], wanted)
    loaded = parameters(there)
    assert loaded.keys() == by_hand.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, by_hand[name]), name
    assert (there.lm_head is there.embed) == (model == "tied")


def test_a_model_that_does_not_fit_the_device_is_refused(opened: Device, llama: tuple[Path, Any]) -> None:
    opened.fails_at = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=r"do not fit the memory of cpu \(CUDA out of memory.*larger GPU"):
        load(llama[0])


def test_progress_grows_to_the_total(sharded: Path) -> None:
    heard: list[tuple[int, int]] = []
    load_weights(sharded, load_config(sharded), torch.float32, CPU, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_the_digest_tells_checkpoints_apart(llama: tuple[Path, Any], copy: Path) -> None:
    assert weights_digest(copy) == weights_digest(llama[0])
    edit(copy)  # the same tensors under another header
    digest = weights_digest(copy)
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        weight = load_file(copy / "model.safetensors")[name]
        edit(copy, **{name.replace(".", "__"): weight + 1e-4})
        assert weights_digest(copy) != digest
        edit(copy, **{name.replace(".", "__"): weight})
        assert weights_digest(copy) == digest
    edit(copy, extra=torch.ones(1))
    assert weights_digest(copy) != digest
    edit(copy, extra=None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "4.1.0"}, indent=4))
    assert weights_digest(copy) == digest
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert weights_digest(copy) != digest
