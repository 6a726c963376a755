"""Quantised checkpoints that are read, and those refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.quantisation import Quantisation, load_quantisation, parse_quantisation

FP8 = {"num_bits": 8, "type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def group(weights: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (GPTQ, Quantisation("gptq", zero_offset=1, bits=4, is_shuffled=True)),
        ({**GPTQ, "desc_act": False}, Quantisation("gptq", zero_offset=1, bits=4)),
        ({**GPTQ, "checkpoint_format": "gptq"}, Quantisation("gptq", zero_offset=1, bits=4, is_shuffled=True)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8}, Quantisation("gptq", bits=8, is_shuffled=True)),
        (AWQ, Quantisation("awq", bits=4)),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Quantisation("fp8", (128, 64), bits=8)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Quantisation("fp8", bits=8)),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, Quantisation("fp8", bits=8, expert_bits=4)),
        ({"quant_method": "mxfp4"}, Quantisation("mxfp4", bits=4)),
        (MODELOPT, Quantisation("modelopt", bits=8)),
        ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, Quantisation("modelopt", (128, 128), bits=8)),
        ({**MODELOPT, "quant_algo": None}, Quantisation("modelopt")),  # scales of the KV cache only
        ({**COMPRESSED, **group(FP8)}, Quantisation("compressed-tensors", bits=8)),
        (
            {**COMPRESSED, **group({**FP8, "actorder": "group"})},
            Quantisation("compressed-tensors", bits=8, is_shuffled=True),
        ),
        ({**COMPRESSED, **group(None), "ignore": ["lm_head"]}, Quantisation("compressed-tensors")),
        ({**COMPRESSED, "kv_cache_scheme": FP8, "transform_config": {}}, Quantisation("compressed-tensors")),
        (
            {**COMPRESSED, **group({**FP8, "strategy": "block", "block_structure": [128, 128]})},
            Quantisation("compressed-tensors", (128, 128), bits=8),
        ),
    ],
)
def test_what_is_read(config: dict[str, Any], wanted: Quantisation) -> None:
    assert parse_quantisation(config, "/m") == wanted


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, "quant_method None is not supported; supported are awq, compressed-tensors, fp8, "),
        ([4], "quant_method None"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({**GPTQ, "bits": 3}, "bits is 3 in a checkpoint of gptq; 4, 8 can be read"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv' in a checkpoint of awq; 'gemm', 'GEMM' can be read"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({"quant_method": "fp8", "expert_dtype": "nvfp4"}, "expert_dtype is 'nvfp4' .*'fp4', 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"a block of weights is \[128\]"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4' in a checkpoint of modelopt"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({**COMPRESSED, **group(FP8, format="marlin-24")}, "group_0's format is 'marlin-24'"),
        ({**COMPRESSED, **group({"num_bits": 3, "type": "int"})}, "group_0's weights are int of 3 bits"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"r3": {}}}}, "transform_config rotates"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config's format is"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme's type is 'int'"),
        ({**COMPRESSED, "config_groups": ["group"]}, "config_groups is a list, not an object"),
        ({**COMPRESSED, "config_groups": {"group_0": {"weights": 8}}}, "group_0 is not an object of schemes"),
    ],
)
def test_what_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ModelError, match=f"^/m: .*{words}.*bf16, fp16 or fp32"):
        parse_quantisation(config, "/m")


def test_blocks_of_two_sizes_are_refused() -> None:
    groups = {
        str(size): {"weights": {**FP8, "strategy": "block", "block_structure": [size, size]}} for size in (64, 128)
    }
    with pytest.raises(ModelError, match="config_groups have blocks of 2 sizes"):
        parse_quantisation({**COMPRESSED, "config_groups": groups}, "/m")


def test_modelopts_own_file_says_it_where_config_json_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_quantisation(tmp_path) is None
    own = tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    assert load_quantisation(tmp_path) == Quantisation("modelopt", bits=8)
    own.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match="quant_algo is 'W4A8_AWQ' in a checkpoint of modelopt; 'FP8', "):
        load_quantisation(tmp_path)
    own.write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json cannot be read"):
        load_quantisation(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    assert load_quantisation(tmp_path) == Quantisation("mxfp4", bits=4)
