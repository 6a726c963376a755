"""Checkpoints that say how activations are rounded to fp8, and those refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.activations import Activations, load_activations

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = {**FP8, "strategy": "token", "dynamic": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {**FP8, "strategy": "block", "block_structure": [128, 128]}
BY_128 = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def groups(*schemes: tuple[Any, Any]) -> dict[str, Any]:
    """A config with the weights and activations of each group."""
    named = {f"group_{n}": {"weights": one, "input_activations": two} for n, (one, two) in enumerate(schemes)}
    return {**COMPRESSED, "config_groups": named}


def load(directory: Path, config: Any) -> Activations:
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return load_activations(directory)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (groups((FP8, TOKEN)), Activations()),
        (groups((FP8, TOKEN), ({"num_bits": 4, "type": "int"}, None)), Activations()),
        (groups((BLOCKS, BY_128)), Activations(group_size=128)),
        (groups((FP8, {**FP8, "strategy": "tensor", "dynamic": False})), Activations(is_static=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Activations(group_size=128)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Activations()),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Activations(is_static=True)),
        (MODELOPT, Activations(is_static=True)),
        ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Activations()),
    ],
)
def test_what_is_computed(config: Any, wanted: Activations, tmp_path: Path) -> None:
    assert load(tmp_path, config) == wanted


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "its weights are not quantised; leave it out"),
        ({"quant_method": "awq", "bits": 4}, "its weights are quantised by awq"),
        ({"quant_method": "quanto"}, "quant_method 'quanto' is not supported"),
        (groups((FP8, None)), "group_0's input_activations are not float of 8 bits"),
        (groups((FP8, {**TOKEN, "type": "int"})), "group_0's input_activations are not float of 8 bits"),
        (groups(({"num_bits": 8, "type": "int"}, TOKEN)), "none of its config_groups has weights in fp8"),
        (groups((FP8, TOKEN), (FP8, BY_128)), "group_0, group_1 round activations in unlike ways"),
        (groups((FP8, {**TOKEN, "symmetric": False})), "group_0's input_activations are not symmetric"),
        (
            groups((FP8, {**TOKEN, "strategy": "tensor"})),
            "strategy 'tensor' with dynamic True; dynamic by token or group",
        ),
        (groups((FP8, {**BY_128, "group_size": 48})), "groups of 48, which is no multiple of 32"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "groups of 16, which is no multiple of 32"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            "activation_scheme is 'static' beside blocks of 128",
        ),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme is 'none'; dynamic is computed"),
        ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, "quant_algo is 'FP8_PB_WO'; FP8 and FP8_PER_CHANNEL_PER_TOKEN round"),
    ],
)
def test_what_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load(tmp_path, config)
