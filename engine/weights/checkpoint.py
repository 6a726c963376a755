"""Weights from safetensors files into packed parameters, one tensor at a time.

Parameters are allocated once, on the model's device, in the form the model computes with (q, k and v in one matrix, gate and
up in one). On a CPU every checkpoint tensor is copied from the memory-mapped file into its place, so no weight is in memory
twice. On a GPU safetensors reads it onto the device, and it is copied, and converted, into its place there: beside the
parameters the device holds one tensor at a time, as the file has it, and the host none but that one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding, Weight

Progress = Callable[[int, int], None]
_SAMPLE_NBYTES = 4096  # of the digest


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Biases and q/k norms are None where the model has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Weight  # [q_size + 2 * kv_size, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    o: Weight  # [hidden, q_size]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: Weight  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class ModelWeights:
    """All weights; ``lm_head`` is ``embed`` itself where the two are tied."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    rounding: Rounding | None = None,
) -> ModelWeights:
    """Load a checkpoint onto ``device``. ``progress`` hears (bytes done, bytes in all).

    ``rounding``: of the layers' projections, None for none; each tensor is rounded as it comes, so they are never there in full.
    At most the parameters, the checkpoint's largest tensor, in the file's dtype, and what rounding 2**24 elements takes in fp32
    (some 130 MiB) are on the device at a time; what torch keeps of that for later tensors is its own. Raises ModelError naming the
    file or tensor on a missing shard, a truncated file, a missing tensor or a wrong shape, and on a GPU too small for the model.
    """
    try:
        return _load(directory, config, dtype, device, progress, rounding)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights of {directory} in {dtype} do not fit the memory of {device} ({error}): free what others hold of it, "
            "or take a larger GPU or a smaller model"
        ) from error


def _load(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    rounding: Rounding | None,
) -> ModelWeights:
    weights, places = _allocate(config, dtype, device, rounding)
    device_name = str(weights.norm.device)  # with its index, which safetensors would take for 0 if it were left out
    files = checkpoint_files(directory)
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        try:
            with safe_open(path, framework="pt", device=device_name) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    place = places.pop(name, None)
                    if place is None:
                        _check_unused(path, name, config)
                        continue
                    tensor = file.get_tensor(name)
                    if tensor.shape != place.shape:
                        raise ModelError(
                            f"{path}: tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}"
                        )
                    place.copy_(tensor)
                    done += tensor.nbytes
                    del tensor  # else it would stay on the device while the next one is read
                    progress(min(done, total), total)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} cannot be read ({error}); it is truncated or no safetensors file: fetch it again"
            ) from error
    if places:
        missing = sorted(places)
        raise ModelError(f"{directory}: {len(missing)} tensors missing from the checkpoint, the first is {missing[0]}")
    progress(total, total)
    return weights


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order. Raises ModelError if there are none or a shard is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} names {outside[0]!r}, which lies outside the directory")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(
                f"{directory}: shard {missing[0]} is missing ({len(missing)} of {len(names)}); fetch it again"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{directory} has no model.safetensors (nor an index of shards); only safetensors are loaded")
    return [single]


def weights_digest(directory: Path) -> str:
    """A digest that tells checkpoints apart without reading all of them.

    It covers config.json but the version that wrote it, every file's size and safetensors header (names, shapes, types), the
    first 4 KiB of every tensor, and 64 samples of 4 KiB spread over each file. Two checkpoints of one shape that differ in a few
    single weights could share it; a fine-tune, even of norms alone, another quantization or another training step does not.
    The files must be whole, as they are once they were loaded.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)  # workers of two releases may have converted one model each
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in checkpoint_files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            data_start = 8 + len(header)
            for name, tensor in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    start, end = tensor["data_offsets"]
                    file.seek(data_start + start)
                    digest.update(file.read(min(_SAMPLE_NBYTES, end - start)))
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(_SAMPLE_NBYTES))
    return digest.hexdigest()


def _check_unused(path: Path, name: str, config: ModelConfig) -> None:
    """Raise ModelError for a tensor we have no use for, unless the model is the same without it."""
    is_tied_head = name == "lm_head.weight" and config.has_tied_embeddings
    is_rotary_buffer = name.endswith(".rotary_emb.inv_freq")  # of old checkpoints, follows from the config
    if not (is_tied_head or is_rotary_buffer or is_attention_scale(name)):
        raise ModelError(
            f"{path}: tensor {name} is unknown to {config.architecture} with this config.json; it would be ignored"
        )


def _allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, rounding: Rounding | None
) -> tuple[ModelWeights, dict[str, Weight]]:
    """Empty parameters, and where each checkpoint tensor belongs in them."""
    places: dict[str, Weight] = {}

    def parameter(name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        places[name] = tensor
        return tensor

    def projection(prefix: str, parts: tuple[tuple[str, int], ...], num_columns: int) -> Weight:
        shape = (sum(size for _, size in parts), num_columns)
        matrix: Weight
        if rounding is None:
            matrix = torch.empty(shape, dtype=dtype, device=device)
        else:
            matrix = RoundedWeight.empty(shape, rounding, dtype, device)
        start = 0
        for name, size in parts:
            places[f"{prefix}{name}.weight"] = matrix[start : start + size]
            start += size
        return matrix

    def packed_bias(prefix: str, parts: tuple[tuple[str, int], ...]) -> torch.Tensor:
        tensor = torch.empty(sum(size for _, size in parts), dtype=dtype, device=device)
        start = 0
        for name, size in parts:
            places[f"{prefix}{name}.bias"] = tensor[start : start + size]
            start += size
        return tensor

    hidden, mid = config.hidden_size, config.intermediate_size
    qkv_parts = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    gate_up_parts = (("gate_proj", mid), ("up_proj", mid))
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        layer, attention, mlp = (
            f"model.layers.{index}.",
            f"model.layers.{index}.self_attn.",
            f"model.layers.{index}.mlp.",
        )
        layers.append(
            LayerWeights(
                input_norm=parameter(f"{layer}input_layernorm.weight", hidden),
                qkv=projection(attention, qkv_parts, hidden),
                qkv_bias=packed_bias(attention, qkv_parts) if config.has_qkv_bias else None,
                q_norm=parameter(f"{attention}q_norm.weight", config.head_dim) if config.has_qk_norm else None,
                k_norm=parameter(f"{attention}k_norm.weight", config.head_dim) if config.has_qk_norm else None,
                o=projection(attention, (("o_proj", hidden),), config.q_size),
                o_bias=parameter(f"{attention}o_proj.bias", hidden) if config.has_o_bias else None,
                post_norm=parameter(f"{layer}post_attention_layernorm.weight", hidden),
                gate_up=projection(mlp, gate_up_parts, hidden),
                gate_up_bias=packed_bias(mlp, gate_up_parts) if config.has_mlp_bias else None,
                down=projection(mlp, (("down_proj", hidden),), mid),
                down_bias=parameter(f"{mlp}down_proj.bias", hidden) if config.has_mlp_bias else None,
            )
        )
    embed = parameter("model.embed_tokens.weight", config.vocab_size, hidden)
    norm = parameter("model.norm.weight", hidden)
    lm_head = embed if config.has_tied_embeddings else parameter("lm_head.weight", config.vocab_size, hidden)
    return ModelWeights(embed, layers, norm, lm_head), places
