"""Checkpoints that are whole, sharded, broken, or of another shape than their config says."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut, cuts_of
from kvrelay.engine.config.model import ModelConfig, load_config
from kvrelay.engine.weights import checkpoint
from kvrelay.engine.weights.checkpoint import load_weights, weights_digest
from kvrelay.engine.weights.parameters import ModelWeights
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
    torch.testing.assert_close(weights.layers[1].attention.qkv, qkv, rtol=0, atol=0)
    gate_up = torch.cat([theirs[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    torch.testing.assert_close(weights.layers[1].mlp.gate_up, gate_up, rtol=0, atol=0)
    assert torch.equal(weights.lm_head, theirs["lm_head.weight"])


def test_shards_give_the_same_weights_in_any_dtype(llama: tuple[Path, Any], sharded: Path) -> None:
    whole, parts = load(llama[0], torch.bfloat16), load(sharded, torch.bfloat16)
    assert torch.equal(whole.layers[2].mlp.down, parts.layers[2].mlp.down)
    assert parts.embed.dtype == torch.bfloat16


class Device:
    """What safetensors' files are opened with instead: tensors are new memory on ``kind``, which it counts."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.asked: set[str] = set()  # devices that files were opened for
        self.live_nbytes = self.peak_nbytes = self.largest_nbytes = 0
        self.read_nbytes = 0
        self.fails_at: str | None = None

    def open(self, path: Path, framework: str, device: str) -> DeviceFile:
        self.asked.add(device)
        return DeviceFile(self, safe_open(path, framework))

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        held = torch.empty_like(tensor, device=self.kind).copy_(tensor)
        self.read_nbytes += held.nbytes
        self.largest_nbytes = max(self.largest_nbytes, held.nbytes)
        self.live_nbytes += held.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        weakref.finalize(held, self._free, held.nbytes)
        return held

    def _free(self, nbytes: int) -> None:
        self.live_nbytes -= nbytes


class DeviceFile:
    """A file of a :class:`Device`."""

    def __init__(self, device: Device, file: Any) -> None:
        self._device = device
        self._file = file

    def __enter__(self) -> DeviceFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        if name == self._device.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB")
        return self._device.hold(self._file.get_tensor(name))

    def get_slice(self, name: str) -> DeviceSlice:
        return DeviceSlice(self._device, self._file.get_slice(name))


class DeviceSlice:
    """A tensor of which a part is asked for."""

    def __init__(self, device: Device, whole: Any) -> None:
        self._device = device
        self._whole = whole

    def get_shape(self) -> list[int]:
        return list(self._whole.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        return self._device.hold(self._whole[part])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device without an allocator of torch's own, in the CPU's memory."""
    device = Device("cpu")
    monkeypatch.setattr("kvrelay.engine.weights.reader.safe_open", device.open)
    return device


MODELS: dict[str, Any] = {
    "untied": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**SIZES),
}


def expected(directory: Path, num_layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters by hand: every file whole, joined, then converted."""
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
    """Named as ``expected`` names them."""
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
    assert opened.largest_nbytes == opened.peak_nbytes > 0  # one tensor of the file's at a time
    assert opened.live_nbytes == 0
    by_hand = expected(tmp_path, SIZES["num_hidden_layers"], wanted)
    loaded = parameters(there)
    assert loaded.keys() == by_hand.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, by_hand[name]), name
    assert (there.lm_head is there.embed) == (model == "tied")


def test_files_are_read_onto_the_device_of_the_parameters(opened: Device, sharded: Path) -> None:
    opened.kind = "meta"
    heard: list[tuple[int, int]] = []
    weights = load_weights(
        sharded, load_config(sharded), torch.bfloat16, torch.device("meta"), lambda *told: heard.append(told)
    )
    assert opened.asked == {"meta"}
    assert {tensor.device.type for tensor in parameters(weights).values()} == {"meta"}
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1]


def test_a_model_that_does_not_fit_the_device_is_refused(opened: Device, llama: tuple[Path, Any]) -> None:
    opened.fails_at = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=r"do not fit the memory of cpu \(CUDA out of memory.*larger GPU"):
        load(llama[0])


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
    """Whoever takes memory for weights fails the test."""
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
    """Their numbers mean something else than they seem to, as their scales are left out."""
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_ranks_have_each_element_once_and_read_no_more(
    opened: Device, tmp_path: Path, model: str, num_ranks: int
) -> None:
    """Two K/V heads: at six ranks each is there three times."""
    save_model(tmp_path, MODELS[model])
    config = load_config(tmp_path)
    whole = parameters(load(tmp_path))
    cuts = [Cut(rank, num_ranks) for rank in range(num_ranks)]
    read_before, parts = opened.read_nbytes, []
    for cut in cuts:
        parts.append(parameters(load_weights(tmp_path, config, torch.float32, CPU, lambda done, total: None, cut=cut)))
        assert opened.read_nbytes - read_before <= sum(part.nbytes for part in parts[-1].values())
        read_before = opened.read_nbytes
    for name, tensor in whole.items():
        field = name.rpartition(".")[2]
        own = [part[name] for part in parts if name in part]
        if field in ("o_bias", "down_bias"):
            assert len(own) == 1, "a bias that is added once for each rank"
            assert torch.equal(own[0], tensor)
        elif "norm" in field:
            assert all(torch.equal(one, tensor) for one in own)
        elif field in ("embed", "lm_head"):
            assert torch.equal(torch.cat(own)[: len(tensor)], tensor)
            assert not torch.cat(own)[len(tensor) :].any()
        elif field in ("o", "down"):
            assert torch.equal(torch.cat(own, dim=1), tensor)
        else:
            assert_joined(field, config, cuts, own, tensor)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(**SIZES, num_local_experts=5, sliding_window=None),
        transformers.GptOssConfig(**SIZES, num_local_experts=5, attention_bias=True),
    ],
)
def test_ranks_with_whole_experts_have_each_once_and_read_no_others(
    opened: Device, tmp_path: Path, config: Any
) -> None:
    save_model(tmp_path, config)
    whole, parts = load(tmp_path), []
    for rank in range(2):
        read_before, cut = opened.read_nbytes, Cut(rank, 2, has_whole_experts=True)
        part = load_weights(tmp_path, load_config(tmp_path), torch.float32, CPU, lambda done, total: None, cut=cut)
        held = [*parameters(part).values(), *(one for layer in part.layers for one in tensors(layer.mlp))]
        assert opened.read_nbytes - read_before <= sum(tensor.nbytes for tensor in held)
        parts.append(part)
    for layer, *own in zip(whole.layers, *(part.layers for part in parts), strict=True):
        first, second = (tensors(one.mlp) for one in own)
        for expected, *joined in zip(tensors(layer.mlp), first, second, strict=True):
            assert torch.equal(torch.cat(joined), expected)


@pytest.mark.parametrize("model", MODELS)
def test_stages_have_their_layers_and_read_no_others(opened: Device, tmp_path: Path, model: str) -> None:
    save_model(tmp_path, MODELS[model])
    config = load_config(tmp_path)
    whole = load(tmp_path)
    for cut in cuts_of(1, 3):
        read_before = opened.read_nbytes
        part = load_weights(tmp_path, config, torch.float32, CPU, lambda done, total: None, cut=cut)
        assert opened.read_nbytes - read_before <= sum(one.nbytes for one in parameters(part).values())
        layers = cut.layers(config.num_layers)
        assert len(part.layers) == len(layers)
        expected = parameters(dataclasses.replace(whole, layers=[whole.layers[layer] for layer in layers]))
        own = parameters(part)
        has_embed, has_head = cut.is_first or (cut.is_last and config.has_tied_embeddings), cut.is_last
        assert [name in own for name in ("embed", "norm", "lm_head")] == [has_embed, has_head, has_head]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
        assert expected.keys() - own.keys() <= {"embed", "norm", "lm_head"}


def tensors(mlp: Any) -> list[torch.Tensor]:
    """Of experts."""
    experts = mlp.experts
    every = (experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias)
    return [tensor for tensor in every if tensor is not None]


def assert_joined(
    field: str, config: ModelConfig, cuts: list[Cut], own: list[torch.Tensor], whole: torch.Tensor
) -> None:
    """Of q, k and v, or gate and up, each rank has its rows of the first, then of the next."""
    sizes = [config.q_size, config.kv_size, config.kv_size]
    parts = [[cut.config(config).q_size, *[cut.config(config).kv_size] * 2] for cut in cuts]
    if field.startswith("gate_up"):
        sizes = [config.intermediate_size] * 2
        parts = [[cut.config(config).intermediate_size] * 2 for cut in cuts]
    split = [tensor.split(part) for tensor, part in zip(own, parts, strict=True)]
    for place, expected_part in enumerate(whole.split(sizes)):
        rows = [one[place] for one in split]
        num_copies = sum(map(len, rows)) // len(expected_part)
        assert torch.equal(torch.cat(rows[::num_copies]), expected_part)
        assert all(torch.equal(one, rows[index // num_copies * num_copies]) for index, one in enumerate(rows))


def test_a_tensor_that_is_too_small_for_its_ranks_is_named(copy: Path) -> None:
    edit(copy, lm_head__weight=torch.ones(100, 48))
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[100, 48\]; config\.json asks for \[199, 48\]"):
        load_weights(copy, load_config(copy), torch.float32, CPU, lambda done, total: None, cut=Cut(1, 2))
