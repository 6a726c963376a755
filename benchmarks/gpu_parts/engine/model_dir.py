"""Writes a model directory with random weights, in place of a download.

All layers have the same random numbers, which are drawn once. A device's speed does not depend on that.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_parts.frame.running import Context
from gpu_parts.frame.sizes import ModelShape

_STD = 0.02
_WRITERS = 6


def model_directory(context: Context) -> Path:
    """The run's model, written by the first section that needs it. Raises OSError if there is no room."""
    directory = context.work / "model"
    if not directory.exists():
        partial = context.work / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a stopped section
        write_model(partial, context.sizes.shape, context.generator())
        partial.rename(directory)
    return directory


def write_model(directory: Path, shape: ModelShape, generator: torch.Generator, std: float = _STD) -> None:
    """Write config and weights of ``shape``, drawn on the generator's device, into the new ``directory``.

    ``std``: standard deviation of the weights; 0.02 is usual for new models.
    """
    dtype = getattr(torch, shape.dtype)
    assert isinstance(dtype, torch.dtype)

    def drawn(*sizes: int) -> torch.Tensor:
        values = torch.empty(sizes, dtype=dtype, device=generator.device)
        return values.normal_(std=std, generator=generator).cpu()

    hidden, mid = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm": torch.ones(hidden, dtype=dtype),
        "self_attn.q_proj": drawn(q_size, hidden),
        "self_attn.k_proj": drawn(kv_size, hidden),
        "self_attn.v_proj": drawn(kv_size, hidden),
        "self_attn.o_proj": drawn(hidden, q_size),
        "post_attention_layernorm": torch.ones(hidden, dtype=dtype),
        "mlp.gate_proj": drawn(mid, hidden),
        "mlp.up_proj": drawn(mid, hidden),
        "mlp.down_proj": drawn(hidden, mid),
    }
    files = {
        f"layer-{index:03}.safetensors": {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
        for index in range(shape.num_layers)
    }
    files["ends.safetensors"] = {
        "model.embed_tokens.weight": drawn(shape.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": drawn(shape.vocab_size, hidden),
    }
    directory.mkdir(parents=True)
    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(lambda name: save_file(files[name], directory / name, {"format": "pt"}), files))
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))


def scratch_directory(nbytes: int) -> Path:
    """A directory for ``nbytes`` bytes during the run: in memory if there is plenty, else on disk."""
    memory = Path("/dev/shm")
    if memory.is_dir():
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize > 2 * nbytes:
            return memory
    return Path(os.environ.get("TMPDIR", "/tmp"))
