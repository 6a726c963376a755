"""Kimi K2, K2.5 and A.X-K1 as their makers publish them: names, number formats and keys that transformers does not write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import load_config, needs_transformers
from kvrelay.engine.config.quantisation import load_quantisation
from kvrelay.engine.outline import compare, outline_model
from kvrelay.engine.weights.checkpoint import check_files, load_weights
from kvrelay.engine.weights.parameters import SparseWeights
from tests.models.test_types import saved

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

YARN = {
    "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 1.0, "beta_slow": 1.0,
}  # fmt: skip
INT4 = QuantizationScheme(
    targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
)


def change_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """``change``: a tensor's name and the tensor -> what the file has instead."""
    path = directory / "model.safetensors"
    held: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        held |= change(name, tensor)
    save_file(held, path, metadata={"format": "pt"})


def in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Projections in blocks of 8 by 8."""
    if not name.endswith(("_proj.weight", "_with_mqa.weight")):
        return {name: tensor}
    num_outs, num_ins = tensor.shape
    blocks = tensor.view(num_outs // 8, 8, num_ins // 8, 8)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scale}


def experts_in_int4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".mlp.experts." not in name:
        return {name: tensor}
    scale = tensor.view(len(tensor), -1, 32).abs().amax(dim=2) / 7
    stored = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, INT4)
    return {f"{name.removesuffix('weight')}{part}": one.contiguous() for part, one in stored.items()}


def test_kimi_k2_runs_in_blocks_of_fp8(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path, v_head_dim=16)
    change_tensors(tmp_path, in_fp8)

    def as_kimi(config: dict[str, Any]) -> None:
        config["model_type"] = "kimi_k2"
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
        config["rope_scaling"], config["rope_theta"] = YARN, 50000.0
        del config["rope_parameters"]
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e4m3"}

    change_config(tmp_path, as_kimi)
    assert not needs_transformers("auto", tmp_path)
    assert load_config(tmp_path).max_position_embeddings == 512
    assert compare(tmp_path, "native") < 2e-6
    assert compare(tmp_path, "transformers") < 2e-6


@pytest.fixture
def kimi_k25(tmp_path: Path) -> Path:
    """Its experts are in int4. The config of the text describes that."""
    saved("kimi_k25", tmp_path)
    change_tensors(tmp_path, experts_in_int4)

    def as_published(config: dict[str, Any]) -> None:
        config["architectures"] = ["KimiK25ForConditionalGeneration"]
        text = config["text_config"]
        text["model_type"], text["rope_scaling"] = "kimi_k2", YARN
        del text["rope_parameters"]
        group = {**json.loads(INT4.model_dump_json()), "format": "pack-quantized"}
        text["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
        }  # fmt: skip

    change_config(tmp_path, as_published)
    return tmp_path


def test_kimi_k25_has_experts_in_int4(kimi_k25: Path) -> None:
    names = load_file(kimi_k25 / "model.safetensors")
    assert "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed" in names
    found = load_quantisation(kimi_k25)
    assert found is not None
    assert (found.method, found.bits) == ("compressed-tensors", 4)
    outline = outline_model(kimi_k25, "auto", 16)
    assert (outline.path, outline.has_stored) == ("native", True)
    assert [group.key_size for group in outline.geometry.groups] == [24]
    assert compare(kimi_k25, "native") < 2e-6
    assert compare(kimi_k25, "transformers") < 2e-6


def test_scales_for_an_fp8_pool_that_nothing_uses_are_passed_over(kimi_k25: Path) -> None:
    def with_scale(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        module = name.removesuffix("o_proj.weight")
        return {name: tensor} if module == name else {name: tensor, f"{module}k_proj.k_scale": torch.tensor(0.5)}

    change_tensors(kimi_k25, with_scale)
    assert "language_model.model.layers.1.self_attn.k_proj.k_scale" in load_file(kimi_k25 / "model.safetensors")
    check_files(kimi_k25, load_config(kimi_k25))
    assert compare(kimi_k25, "transformers") < 2e-6


def test_of_kimi_k25_only_what_reads_images_is_passed_over(kimi_k25: Path) -> None:
    check_files(kimi_k25, load_config(kimi_k25))
    change_tensors(kimi_k25, lambda name, tensor: {name.replace("vision_tower.", "ear."): tensor})
    with pytest.raises(ModelError, match=r"tensor ear\..* is unknown to KimiK25ForConditionalGeneration"):
        check_files(kimi_k25, load_config(kimi_k25))
    change_config(kimi_k25, lambda config: config.pop("text_config"))
    with pytest.raises(ModelError, match=r"config\.json has no 'text_config', which describes its decoder of text"):
        load_config(kimi_k25)


def test_a_x_k1_has_norms_that_nothing_uses_and_no_bias_for_choices(tmp_path: Path) -> None:
    saved("axk1", tmp_path)

    def as_published(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("e_score_correction_bias"):
            return {}
        if name == "model.layers.0.post_attention_layernorm.weight":
            return {name: tensor, "model.layers.0.post_mlp_layernorm.weight": tensor.clone()}
        return {name: tensor}

    def without_kinds(config: dict[str, Any]) -> None:
        config.pop("mlp_layer_types", None)  # newer releases of transformers write these
        config |= {"first_k_dense_replace": 1, "moe_layer_freq": 1}

    change_config(tmp_path, without_kinds)
    assert compare(tmp_path, "native") < 2e-6
    change_tensors(tmp_path, as_published)  # older releases of transformers do not read this
    weights = load_weights(tmp_path, load_config(tmp_path), torch.float32, torch.device("cpu"), lambda *_: None)
    experts = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, SparseWeights)]
    assert len(experts) == 3
    for one in experts:
        assert one.choice_bias is not None
        assert not one.choice_bias.any()
