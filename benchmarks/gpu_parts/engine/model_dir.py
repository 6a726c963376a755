"""Writes a model directory with random weights, in place of a download.

All layers have the same random numbers, which are drawn once. A device's speed does not depend on that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_parts.frame.running import Context
from gpu_parts.frame.sizes import ModelShape
from gpu_parts.kernels.stored_linears import random_stored

_STD = 0.02
_WRITERS = 6


def model_directory(context: Context) -> Path:
    """The run's model, written by the first section that needs it. Raises OSError if there is no room."""
    return _written(
        context, "model", lambda directory: write_model(directory, context.sizes.shape, context.generator())
    )


def stored_model_directory(context: Context) -> Path:
    """The same model in 4 bits. Raises OSError if there is no room."""
    sizes = context.sizes
    return _written(
        context,
        "model-4bit",
        lambda directory: write_stored_model(directory, sizes.shape, sizes.group_size, context.generator()),
    )


def write_model(directory: Path, shape: ModelShape, generator: torch.Generator, std: float = _STD) -> None:
    """Write config and weights of ``shape``, drawn on the generator's device, into the new ``directory``.

    ``std``: standard deviation of the weights; 0.02 is usual for new models.
    """

    def full(num_outs: int, num_ins: int) -> dict[str, torch.Tensor]:
        return {"weight": _drawn(shape, generator, std, num_outs, num_ins)}

    _write(directory, shape, generator, std, full, shape.config())


def write_stored_model(directory: Path, shape: ModelShape, group_size: int, generator: torch.Generator) -> None:
    """The same with layers in 4 bits as compressed-tensors packs them, symmetric, with a scale for ``group_size`` inputs."""

    def packed(num_outs: int, num_ins: int) -> dict[str, torch.Tensor]:
        stored = random_stored(generator, num_outs, num_ins, group_size, _dtype(shape))
        return {
            # Eight numbers in a word, the first in its lowest bits.
            "weight_packed": stored.values.view(torch.int32).cpu(),
            "weight_scale": stored.scale.cpu(),
            "weight_shape": torch.tensor((num_outs, num_ins)),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    _write(directory, shape, generator, _STD, packed, {**shape.config(), "quantization_config": quantization})


def _written(context: Context, name: str, write: Callable[[Path], None]) -> Path:
    """The directory ``name`` of the run, made by ``write`` if it is not there."""
    directory = context.work / name
    if not directory.exists():
        partial = context.work / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a stopped section
        write(partial)
        partial.rename(directory)
    return directory


def _write(
    directory: Path,
    shape: ModelShape,
    generator: torch.Generator,
    std: float,
    matrix: Callable[[int, int], Mapping[str, torch.Tensor]],
    config: Mapping[str, object],
) -> None:
    """Write a model into the new ``directory``. ``matrix`` draws the tensors of a layer's matrix ``[out, in]``."""
    hidden, mid = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (mid, hidden),
        "mlp.up_proj": (mid, hidden),
        "mlp.down_proj": (hidden, mid),
    }
    layer = {  # of its own memory each: safetensors writes no shared tensors
        f"{name}.weight": torch.ones(hidden, dtype=_dtype(shape))
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for name, sizes in matrices.items():
        layer |= {f"{name}.{part}": tensor for part, tensor in matrix(*sizes).items()}
    files = {
        f"layer-{index:03}.safetensors": {f"model.layers.{index}.{name}": value for name, value in layer.items()}
        for index in range(shape.num_layers)
    }
    files["ends.safetensors"] = {
        "model.embed_tokens.weight": _drawn(shape, generator, std, shape.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=_dtype(shape)),
        "lm_head.weight": _drawn(shape, generator, std, shape.vocab_size, hidden),
    }
    directory.mkdir(parents=True)
    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(lambda name: save_file(files[name], directory / name, {"format": "pt"}), files))
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _drawn(shape: ModelShape, generator: torch.Generator, std: float, *sizes: int) -> torch.Tensor:
    values = torch.empty(sizes, dtype=_dtype(shape), device=generator.device)
    return values.normal_(std=std, generator=generator).cpu()


def _dtype(shape: ModelShape) -> torch.dtype:
    dtype = getattr(torch, shape.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def scratch_directory(nbytes: int) -> Path:
    """A directory for ``nbytes`` bytes during the run: in memory if there is plenty, else on disk."""
    memory = Path("/dev/shm")
    if memory.is_dir():
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize > 2 * nbytes:
            return memory
    return Path(os.environ.get("TMPDIR", "/tmp"))
