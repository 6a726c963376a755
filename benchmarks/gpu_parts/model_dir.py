"""A model directory of random weights: what a user has on disk, without a download.

All layers have the same random numbers under names of their own: a device does not care, and they are drawn once. The files are
written by hand and in parallel, since 16 GB through a serializer are most of a minute.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpu_parts.running import Context
from gpu_parts.sizes import ModelShape

_STD = 0.02
_WRITERS = 6
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def model_directory(context: Context) -> Path:
    """The run's model; the first section that needs it writes it. Raises OSError if it does not fit."""
    directory = context.work / "model"
    if not directory.exists():
        partial = context.work / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a section that was stopped
        write_model(partial, context.sizes.shape, context.generator())
        partial.rename(directory)
    return directory


def write_model(directory: Path, shape: ModelShape, generator: torch.Generator, std: float = _STD) -> None:
    """Write config and weights of ``shape``, drawn on the generator's device, into the new directory ``directory``.

    ``std``: the weights' spread; 0.02 is what models begin with.
    """
    dtype = getattr(torch, shape.dtype)
    assert isinstance(dtype, torch.dtype)

    def drawn(*sizes: int) -> torch.Tensor:
        values = torch.empty(sizes, dtype=dtype, device=generator.device)
        return values.normal_(std=std, generator=generator).cpu()

    hidden, mid = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=dtype)
    layer = {
        "input_layernorm": ones,
        "self_attn.q_proj": drawn(q_size, hidden),
        "self_attn.k_proj": drawn(kv_size, hidden),
        "self_attn.v_proj": drawn(kv_size, hidden),
        "self_attn.o_proj": drawn(hidden, q_size),
        "post_attention_layernorm": ones,
        "mlp.gate_proj": drawn(mid, hidden),
        "mlp.up_proj": drawn(mid, hidden),
        "mlp.down_proj": drawn(hidden, mid),
    }
    files: dict[str, Mapping[str, torch.Tensor]] = {
        f"layer-{index:03}.safetensors": {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
        for index in range(shape.num_layers)
    }
    files["ends.safetensors"] = {
        "model.embed_tokens.weight": drawn(shape.vocab_size, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": drawn(shape.vocab_size, hidden),
    }
    directory.mkdir(parents=True)
    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(lambda name: write_safetensors(directory / name, files[name]), files))
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One file: the header's length in 8 bytes, the header as JSON, then all tensors' bytes in the header's order.

    As https://github.com/huggingface/safetensors describes it. The tensors are contiguous and on the CPU.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        kind = _SAFETENSORS_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def scratch_directory(nbytes: int) -> Path:
    """Where so many bytes may lie for the run's time: memory if there is plenty, else the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir():
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize > 2 * nbytes:
            return memory
    return Path(os.environ.get("TMPDIR", "/tmp"))
