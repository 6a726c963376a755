"""Adapters with random numbers in PEFT's format, and the merged model of base and adapter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvrelay.common.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, adapter_digest

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_shapes(model_dir: Path, projections: tuple[str, ...] = PROJECTIONS) -> dict[str, tuple[int, int]]:
    """The shapes ``(outputs, inputs)`` of a checkpoint's linear layers with these names, by module. Routed experts are left out."""
    weights = load_file(model_dir / "model.safetensors")
    ends = tuple(f"{one}.weight" for one in projections)
    names = [name.removesuffix(".weight") for name in weights if name.endswith(ends) and ".experts." not in name]
    return {name: tuple(weights[f"{name}.weight"].shape) for name in names}


def write_adapter(
    directory: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.3,
    **config: Any,
) -> AdapterRef:
    """Write an adapter for the layers in ``shapes``. ``ranks``: PEFT's ``rank_pattern``. ``config``: further
    settings."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (num_outputs, num_inputs) in shapes.items():
        own = next((one for key, one in (ranks or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name)), rank)
        a = torch.randn(own, num_inputs, generator=generator) * size / num_inputs**0.5
        b = torch.randn(num_outputs, own, generator=generator) / own**0.5
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank, "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}), "bias": "none", "use_dora": False,
        "modules_to_save": None, "inference_mode": True, "fan_in_fan_out": False, "init_lora_weights": True,
        "rank_pattern": dict(ranks or {}), "alpha_pattern": {}, "use_rslora": False, **config,
    }  # fmt: skip
    (directory / CONFIG_FILE).write_text(json.dumps(settings))
    save_file(tensors, directory / WEIGHTS_FILE)
    return AdapterRef(directory.name, adapter_digest(directory))


def merge(model_dir: Path, adapter_dir: Path, merged_dir: Path) -> None:
    """Write the model with the weights ``W + scaling * B A`` in fp32, as PEFT merges base and adapter."""
    shutil.copytree(model_dir, merged_dir)
    config = json.loads((adapter_dir / CONFIG_FILE).read_text())
    adapter, weights = load_file(adapter_dir / WEIGHTS_FILE), load_file(model_dir / "model.safetensors")
    for name in [name for name in adapter if ".lora_A." in name]:
        a, b = adapter[name], adapter[name.replace(".lora_A.", ".lora_B.")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = config["alpha_pattern"].items()
        alpha = next((value for key, value in alphas if re.fullmatch(rf"(.*\.)?({key})", module)), config["lora_alpha"])
        scaling = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
        weights[f"{module}.weight"] = weights[f"{module}.weight"].float() + scaling * (b @ a)
    save_file(weights, merged_dir / "model.safetensors", metadata={"format": "pt"})
