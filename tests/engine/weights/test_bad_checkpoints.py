"""Checkpoints that are broken, or do not have their config's shapes, are refused by name."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import load_config
from kvrelay.engine.weights import checkpoint
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.headers import read_headers

from .conftest import CPU, edit, load
from .stored_models import int8
from .storing import store


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


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    nbytes = 2**36  # sparse: it takes no room on the disk
    head = json.dumps({"a": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    head += b" " * (-len(head) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + nbytes)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**35, before[1]))
    try:
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be mapped .*ulimit -v"):
            read_headers(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(copy)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(
        ModelError, match=r"1 tensors are missing from .*model\.safetensors.* model\.layers\.1\.mlp\.up_proj"
    ):
        load(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    edit(copy, model__norm__weight=torch.ones(47))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\]; config\.json asks for \[48\]"):
        load(copy)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if memory for weights is allocated."""
    allocate = checkpoint.allocate

    def refuse(config: Any, dtype: torch.dtype, device: torch.device, *how: Any) -> Any:
        assert device.type == "meta", f"weights on {device}"
        return allocate(config, dtype, device, *how)

    monkeypatch.setattr(checkpoint, "allocate", refuse)


def configure(directory: Path, **fields: Any) -> None:
    """Change fields of ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.usefixtures("no_memory")
def test_a_bad_checkpoint_is_refused_before_memory_is_taken(copy: Path, sharded: Path, tmp_path: Path) -> None:
    edit(copy, model__norm__weight=None)
    with pytest.raises(ModelError, match="1 tensors are missing"):
        load(copy)
    edit(copy, model__norm__weight=torch.ones(48), model__layers__0__mlp__bias=torch.ones(1))
    with pytest.raises(ModelError, match="is unknown to"):
        load(copy)
    parts = Path(shutil.copytree(sharded, tmp_path / "parts"))
    shard = sorted(parts.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ModelError, match=f"{shard.name} cannot be read .*truncated"):
        load(parts)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("hidden_size", 10**5, r"model\.safetensors: tensor .* has shape .* config\.json asks for"),
        ("vocab_size", 10**8, r"model\.safetensors: tensor .* has shape \[199, 48\]; config\.json asks for"),
        ("num_hidden_layers", 10**5, r"config\.json asks for 100000 layers, but the checkpoint has 30 tensors"),
        ("intermediate_size", 10**9, "'intermediate_size' is 1000000000 in config.json; at most 262144 is possible"),
        ("vocab_size", 10**12, "'vocab_size' is 1000000000000 in config.json; at most"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_absurd_sizes_are_refused(name: str, value: int, match: str, copy: Path) -> None:
    configure(copy, **{name: value})
    with pytest.raises(ModelError, match=match):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.usefixtures("no_memory")
def test_quantized_weights_whose_config_does_not_say_so_are_refused(dtype: torch.dtype, copy: Path) -> None:
    """Without their scales the integers or fp8 values would be read as weights."""
    edit(copy, model__layers__1__mlp__down_proj__weight=torch.ones(48, 80).to(dtype))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*down_proj\.weight has format (I8|F8_E4M3)"):
        load(copy)


def test_an_index_that_names_another_shard_is_refused(sharded: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "copy"))
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, *_, last = sorted(set(content["weight_map"].values()))
    name = next(name for name, file in content["weight_map"].items() if file == first)
    content["weight_map"][name] = last
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"{last} lacks tensor {name}, which model.safetensors.index.json says is in"):
        load(directory)


def test_a_tensor_the_model_would_ignore_is_refused(copy: Path) -> None:
    edit(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(copy)
    edit(copy, model__layers__0__self_attn__q_proj__bias=torch.ones(96))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias is unknown to LlamaForCausalLM"):
        load(copy)


@pytest.mark.usefixtures("no_memory")
def test_an_own_head_of_a_model_with_tied_embeddings_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would use it, so the model would be another one without it."""
    monkeypatch.setattr(checkpoint, "_NUM_COMPARED", 50 * 48)  # four pieces, the last one smaller
    configure(copy, tie_word_embeddings=True)
    embedding = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    last = embedding.clone()
    last[-1, -1] += 1
    match = r"model\.safetensors: tensor lm_head\.weight differs from .*: set tie_word_embeddings to false"
    for head in (torch.ones_like(embedding), last, last.bfloat16(), embedding[:-1].clone()):
        edit(copy, lm_head__weight=head)
        with pytest.raises(ModelError, match=match):
            load(copy)
    edit(copy, lm_head__weight=embedding.to(torch.int8))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight has format I8, of a quantised checkpoint"):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_that_equals_the_embedding_is_left_out(dtype: torch.dtype, copy: Path) -> None:
    configure(copy, tie_word_embeddings=True)
    embedding = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    edit(copy, lm_head__weight=embedding.to(dtype, copy=True))
    heard: list[int] = []
    weights = load_weights(copy, load_config(copy), torch.float32, CPU, lambda done, total: heard.append(done))
    assert weights.lm_head is weights.embed
    assert torch.equal(weights.embed, embedding)
    assert heard[0] <= embedding.nbytes, "what was read for the comparison is no progress"


def test_only_full_heads_of_quantised_checkpoints_are_compared_with_the_embedding(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """A quantised head always differs a little from its embedding."""
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized"}

    def stored(name: str, ending: str) -> Path:
        directory = store(
            llama[0],
            tmp_path / name,
            quantization,
            lambda module, weight: int8(weight) if module.endswith(ending) else None,
        )
        configure(directory, tie_word_embeddings=True)
        return directory

    weights = load(stored("head", "lm_head"))
    assert weights.lm_head is weights.embed
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from"):
        load(stored("projections", "_proj"))
