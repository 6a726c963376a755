"""Cuts the demo model down to fewer heads, layers and columns, so that two ranks can share it. Its output is nonsense.

python fewer_heads.py MODEL DIRECTORY
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import safetensors
import safetensors.torch

NAME = "SmolLM2-135M-Instruct-6-heads"
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 4, 6, 2  # of 30, 9 and 3; each K/V head keeps three query heads
NUM_COLUMNS = 256  # of an MLP's 1536


def main() -> None:
    """Write the smaller model to a new directory."""
    model, directory = Path(sys.argv[1]), Path(sys.argv[2]) / NAME
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    fewer = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
    fewer |= {"head_dim": head_dim, "intermediate_size": NUM_COLUMNS}
    (directory / "config.json").write_text(json.dumps({**config, **fewer}))
    rows = {"q_proj": NUM_HEADS * head_dim, "k_proj": NUM_KV_HEADS * head_dim, "v_proj": NUM_KV_HEADS * head_dim}
    rows |= {"gate_proj": NUM_COLUMNS, "up_proj": NUM_COLUMNS}
    columns = {"o_proj": NUM_HEADS * head_dim, "down_proj": NUM_COLUMNS}
    left_out = tuple(f"model.layers.{layer}." for layer in range(NUM_LAYERS, config["num_hidden_layers"]))
    (path,) = model.glob("*.safetensors")
    weights = {}
    with safetensors.safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a file is no dict
            if name.startswith(left_out):
                continue
            weight, product = file.get_tensor(name), name.split(".")[-2]
            if product in rows:
                weight = weight[: rows[product]]
            elif product in columns:
                weight = weight[:, : columns[product]]
            weights[name] = weight.contiguous()
    safetensors.torch.save_file(weights, directory / path.name)


if __name__ == "__main__":
    main()
