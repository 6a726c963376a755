"""Packs weights as GPTQ and AWQ do, from the formats' descriptions, and makes tiny checkpoints of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Integers:
    """Quantised weights ``(values - zero) * scale`` in groups of input features."""

    values: torch.Tensor  # [out, in], at least 0
    zero: torch.Tensor  # [out, num_groups]
    scale: torch.Tensor  # [out, num_groups] fp16
    groups: torch.Tensor  # [in]

    def full(self) -> torch.Tensor:
        """The full weight, ``[out, in]`` fp32, column by column."""
        columns = []
        for column, group in enumerate(self.groups.tolist()):
            columns.append((self.values[:, column] - self.zero[:, group]).float() * self.scale[:, group].float())
        return torch.stack(columns, dim=1)


def integers(weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool, shuffled: bool = False) -> Integers:
    """The nearest integers. ``shuffled``: a group's input features are not adjacent."""
    num_outs, num_ins = weight.shape
    order = torch.randperm(num_ins, generator=torch.Generator().manual_seed(5)) if shuffled else torch.arange(num_ins)
    groups = torch.empty(num_ins, dtype=torch.int64)
    groups[order] = torch.arange(num_ins) // group_size
    values = torch.empty(weight.shape, dtype=torch.int64)
    num_groups = num_ins // group_size
    zero, scale = torch.empty(num_outs, num_groups, dtype=torch.int64), torch.empty(num_outs, num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group].float()
        low, high = part.amin(dim=1).clamp(max=-1e-3), part.amax(dim=1).clamp(min=1e-3)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale[:, group] = ((high - low) / (2**bits - 1)).half().float()
        zero[:, group] = 2 ** (bits - 1) if symmetric else (-low / scale[:, group]).round().clamp(0, 2**bits - 1)
        whole = (part / scale[:, group, None]).round() + zero[:, group, None]
        values[:, groups == group] = whole.clamp(0, 2**bits - 1).long()
    return Integers(values, zero, scale.half(), groups)


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[n, m]`` integers packed into ``[n, m * bits / 32]`` words. ``order``: the order of a word's integers."""
    each = 32 // bits
    parts = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, each)
    words = np.zeros(parts.shape[:2], dtype=np.uint32)
    for place, index in enumerate(order or range(each)):
        words |= parts[:, :, index] << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def gptq(weight: Integers, bits: int, *, zero_offset: int = 1) -> Tensors:
    """The tensors that AutoGPTQ stores."""
    return {
        "qweight": words(weight.values, bits).T.contiguous(),
        "qzeros": words((weight.zero.T - zero_offset) % 2**bits, bits),
        "scales": weight.scale.T.contiguous(),
        "g_idx": weight.groups.int(),
    }


def awq(weight: Integers) -> Tensors:
    """The tensors that AutoAWQ's ``gemm`` stores."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(weight.values.T, 4, order),
        "qzeros": words(weight.zero.T, 4, order),
        "scales": weight.scale.T.contiguous(),
    }


def store(
    source: Path, target: Path, quantization: dict[str, Any], make: Callable[[str, torch.Tensor], Tensors | None]
) -> Path:
    """A copy of a checkpoint. ``make`` returns the stored tensors of a weight by the ends of their names, or None to
    keep it."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    held: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, role = name.rpartition(".")
        parts = make(module, tensor) if role == "weight" and tensor.dim() == 2 else None
        held |= {name: tensor} if parts is None else {f"{module}.{part}": one for part, one in parts.items()}
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return target
