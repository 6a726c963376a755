"""Scales of an fp8 pool: where they are read, which are refused, and how two sets are told apart."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import KvLayout
from kvrelay.engine.config.model import ModelConfig, load_config
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.weights.headers import checkpoint_files
from kvrelay.engine.weights.kv_scales import kv_scales_digest, load_kv_scales
from tests.engine.conftest import load

LAYERS, HEADS = 3, 2


@pytest.fixture
def model(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the plain Llama, to which a test may add scales."""
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


def config_of(directory: Path) -> ModelConfig:
    return load_config(directory)


def scales_of(directory: Path) -> torch.Tensor:
    return load_kv_scales(checkpoint_files(directory), config_of(directory))


def add(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def named(style: str, tensors: dict[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.self_attn.{style.format(kind=kind)}": t for (layer, kind), t in tensors.items()}


def per_tensor() -> dict[tuple[int, str], torch.Tensor]:
    return {(layer, kind): torch.tensor(0.25 * layer + len(kind)) for layer in range(LAYERS) for kind in "kv"}


def random_scales(seed: int = 0) -> torch.Tensor:
    return torch.rand(LAYERS, 2, HEADS, generator=torch.Generator().manual_seed(seed)) + 0.01


def test_without_any_they_are_1_and_that_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = scales_of(model)
    assert scales.shape == (LAYERS, 2, HEADS)
    assert (scales == 1).all()
    assert "K/V scales are 1" in caplog.text


@pytest.mark.parametrize("style", ["{kind}_scale", "{kind}_proj.{kind}_scale", "qkv_proj.{kind}_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_read_by_all_names_and_shapes(style: str, dtype: torch.dtype, model: Path) -> None:
    # A scalar, a vector of one, and a scale for each head as [num_kv_heads, 1, 1].
    shapes = {0: (), 1: (1,), 2: (HEADS, 1, 1)}
    wanted = (random_scales() * 64).round().div(64).clamp_min(1 / 64)
    wanted[:2] = wanted[:2, :, :1]
    tensors = {
        (layer, kind): wanted[layer, index, : math.prod(shapes[layer])].reshape(shapes[layer]).to(dtype)
        for layer in range(LAYERS)
        for index, kind in enumerate("kv")
    }
    add(model, named(style, tensors))
    scales = scales_of(model)
    assert scales.dtype == torch.float32
    torch.testing.assert_close(scales, wanted, rtol=0, atol=0)


def test_an_old_kv_scale_is_of_both(model: Path) -> None:
    add(model, {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(layer + 0.5) for layer in range(LAYERS)})
    assert scales_of(model)[:, :, 1].tolist() == [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]]


def test_a_checkpoint_with_scales_serves_a_pool_that_needs_none(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    queries = {f"model.layers.{layer}.self_attn.q_scale": torch.tensor(1.0) for layer in range(LAYERS)}
    add(model, {**named("{kind}_scale", per_tensor()), **queries})
    config = json.loads((model / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    assert load(model).card.layout.kv_scales == ""
    assert "K/V scales" not in caplog.text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(0.0), r"k_scale is 0;"),
        (torch.tensor(-1.0), r"k_scale is -1;"),  # vLLM's value for a missing scale
        (torch.tensor(math.nan), r"k_scale is nan;"),
        (torch.tensor(math.inf), r"k_scale is inf;"),
        (torch.tensor(1e-60, dtype=torch.float64), r"k_scale is 0;"),  # in fp32
        (torch.tensor([0.5, -2.0]), r"k_scale\[1\] is -2;"),
        (torch.ones(3), r"k_scale has shape \[3\]; it must be one number, or 2, one per KV head"),
        (torch.ones(2, 16), r"k_scale has shape \[2, 16\]"),
        (torch.ones(0), r"k_scale has shape \[0\]"),
    ],
)
def test_what_is_malformed_is_named_with_the_way_out(value: torch.Tensor, words: str, model: Path) -> None:
    add(model, named("{kind}_scale", per_tensor()) | {"model.layers.1.self_attn.k_scale": value})
    way_out = "take a checkpoint with sound scales, or leave --kv-dtype at auto"
    with pytest.raises(ModelError, match=rf"model\.safetensors: model\.layers\.1\.self_attn\.{words}.*{way_out}"):
        scales_of(model)


def test_those_of_a_layer_for_drafting_are_passed_over(model: Path) -> None:
    """Its pool is not in fp8."""
    add(model, named("{kind}_scale", per_tensor()))
    expected = scales_of(model)
    add(model, {"model.layers.3.self_attn.k_scale": torch.tensor(1.0)})
    config = replace(load_config(model), num_draft_layers=1)
    assert torch.equal(load_kv_scales(checkpoint_files(model), config), expected)


def test_sets_that_are_not_whole_are_refused(model: Path, tmp_path: Path) -> None:
    config = load_config(model)
    tensors = named("{kind}_scale", per_tensor())
    path = tmp_path / "scales.safetensors"
    save_file({**tensors, "model.layers.3.self_attn.k_scale": torch.tensor(1.0)}, path)
    with pytest.raises(
        ModelError, match=r"layers\.3\.self_attn\.k_scale is of layer 3; the model has 3: take a checkp"
    ):
        load_kv_scales([path], config)
    save_file({**tensors, "model.layers.2.self_attn.kv_scale": torch.tensor(1.0)}, path)
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\..*k.*_scale are scales of the same k"):
        load_kv_scales([path], config)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale and .* are scales of the same k"):
        load_kv_scales([path, path], config)  # as in two shards
    del tensors["model.layers.2.self_attn.v_scale"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.v_scale is missing, where others are there"):
        load_kv_scales([path], config)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match=r"scales\.safetensors cannot be read"):
        load_kv_scales([path], config)


def layout_of(model: Path, dtype: torch.dtype, scales: torch.Tensor) -> KvLayout:
    return KvLayout(
        model_id="m",
        weights_digest="d",
        geometry=geometry_of(config_of(model), 16, dtype),
        rope="{}",
        kv_scales=kv_scales_digest(scales),
    )


def test_every_bit_of_every_scale_is_in_the_fingerprint(model: Path) -> None:
    """Workers may exchange blocks only if all scales are bit-identical."""

    def layout(scales: torch.Tensor) -> Any:
        return layout_of(model, torch.float8_e4m3fn, scales)

    scales = random_scales()
    add(
        model,
        {
            f"model.layers.{layer}.self_attn.{kind}_scale": scales[layer, "kv".index(kind)].clone()
            for layer in range(LAYERS)
            for kind in "kv"
        },
    )
    mine = layout(scales)
    assert layout(scales_of(model)).fingerprint() == mine.fingerprint()
    for place in ((0, 0, 0), (2, 1, 1)):
        ulp = scales.clone()
        ulp[place] = float(np.nextafter(np.float32(ulp[place]), np.float32(9)))
        other = layout(ulp)
        assert other.fingerprint() != mine.fingerprint()
        (difference,) = mine.differences(other)
        assert difference.startswith("kv_scales: ")
        assert "other K/V scales" in difference
    # Swapped key and value scales differ, too.
    assert layout(scales.flip(1)).fingerprint() != mine.fingerprint()


def test_pools_without_scales_have_the_fingerprint_of_old(llama: tuple[Path, Any]) -> None:
    layout = layout_of(llama[0], torch.bfloat16, torch.ones(3, 2, 2))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(layout))
    assert "kv_scales" not in fields
    assert list(fields) == [name for name in layout.__struct_fields__ if name != "kv_scales"]
