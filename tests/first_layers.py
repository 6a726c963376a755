"""A draft model for any single-file Llama checkpoint: the model's own first layers, which sometimes agree with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import safetensors
import safetensors.torch


def save_first_layers(model: Path, directory: Path, num_layers: int) -> None:
    """Write the draft model, with the model's tokenizer, to the new directory ``directory``."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    (path,) = model.glob("*.safetensors")
    left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
    with safetensors.safe_open(path, "pt") as file:
        kept = [name for name in file.keys() if not name.startswith(left_out)]  # noqa: SIM118 - a file is no dict
        weights = {name: file.get_tensor(name) for name in kept}
    safetensors.torch.save_file(weights, directory / path.name)
