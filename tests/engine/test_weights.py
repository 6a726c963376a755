"""Checkpoints that are whole, sharded, broken, or of another shape than their config says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.model_config import load_config
from kvrelay.engine.weights import ModelWeights, load_weights, weights_digest
from tests.engine.conftest import SIZES, save_model

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(directory, load_config(directory), dtype, CPU, lambda done, total: None)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    save_model(directory, transformers.LlamaConfig(**SIZES), shard_size="60KB")
    return directory


@pytest.fixture
def copy(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the plain Llama that a test may break."""
    return Path(shutil.copytree(llama[0], tmp_path / "copy"))


def edit(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a checkpoint; None takes one out. Dots are written as ``__``."""
    path = directory / "model.safetensors"
    held = load_file(path)
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, path)


def test_projections_are_packed_in_order(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    weights, theirs = load(directory), model.state_dict()
    prefix = "model.layers.1."
    qkv = torch.cat([theirs[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    torch.testing.assert_close(weights.layers[1].qkv, qkv, rtol=0, atol=0)
    gate_up = torch.cat([theirs[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    torch.testing.assert_close(weights.layers[1].gate_up, gate_up, rtol=0, atol=0)
    assert torch.equal(weights.lm_head, theirs["lm_head.weight"])


def test_shards_give_the_same_weights_in_any_dtype(llama: tuple[Path, Any], sharded: Path) -> None:
    whole, parts = load(llama[0], torch.bfloat16), load(sharded, torch.bfloat16)
    assert torch.equal(whole.layers[2].down, parts.layers[2].down)
    assert parts.embed.dtype == torch.bfloat16


def test_progress_grows_to_the_total(sharded: Path) -> None:
    heard: list[tuple[int, int]] = []
    load_weights(sharded, load_config(sharded), torch.float32, CPU, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "copy"))
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name} is missing"):
        load(directory)


def test_a_broken_index_is_named(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        load(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../else.safetensors"}}))
    with pytest.raises(ModelError, match="outside"):
        load(copy)


@pytest.mark.parametrize("nbytes", [0, 5, 200, 50_000])
def test_a_truncated_file_is_named(copy: Path, nbytes: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*truncated"):
        load(copy)


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(copy)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"1 tensors? .*missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    edit(copy, model__norm__weight=torch.ones(47))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\]; config\.json asks for \[48\]"):
        load(copy)


def test_a_tensor_the_model_would_ignore_is_refused(copy: Path) -> None:
    edit(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(copy)
    edit(copy, model__layers__0__self_attn__q_proj__bias=torch.ones(96))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias is unknown to LlamaForCausalLM"):
        load(copy)


def test_the_digest_tells_checkpoints_apart(llama: tuple[Path, Any], copy: Path) -> None:
    assert weights_digest(copy) == weights_digest(llama[0])
    edit(copy)  # the same tensors, with another header than transformers'
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
