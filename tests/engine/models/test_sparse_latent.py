"""Sparse attention over latents on the CPU, against transformers, which masks what an indexer does not pick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.sparse_attention import ranked
from kvrelay.engine.config.cut import require_indexers
from kvrelay.engine.config.model import load_config
from kvrelay.engine.outline import compare
from tests.engine.models.test_latent import GROUPS, YARN, save
from tests.engine.weights.stored_models import FORMATS
from tests.engine.weights.storing import store
from tests.models.tiny import EXPERTS, LATENT, SIZES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
    pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers has no deepseek_v32"),
]

# Of 16 heads one has a positive product with nearly every key. Scores of 0 are equal, and transformers takes any of them.
INDEXER = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3.2": ("deepseek_v32", {**GROUPS, "rope_parameters": YARN}),
    "v3.2 with a part of the prompt": ("deepseek_v32", {"index_topk": 20}),
    "v3.2 sees all": ("deepseek_v32", {"index_topk": 2048}),
    "glm-5": ("glm_moe_dsa", {}),
    "glm-5 with shared picks": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_masked_attention(variant: str, tmp_path: Path) -> None:
    model_type, fields = VARIANTS[variant]
    save(tmp_path, model_type, **{**INDEXER, **fields})
    assert compare(tmp_path, "native") < 2e-6


def test_what_is_picked_matters(tmp_path: Path) -> None:
    """So that the test above can fail."""
    model = save(tmp_path, "deepseek_v32", **INDEXER)
    token_ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        picked = model(token_ids).logits
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 2048
        assert (model(token_ids).logits - picked).abs().max() > 0.01


def test_of_equal_scores_the_first_positions_are_picked() -> None:
    scores = torch.tensor([[0.0, -1.0, 2.0, -0.0, 0.0, -3.0, 2.0]])
    assert ranked(scores).topk(7).indices.tolist() == [[2, 6, 0, 3, 4, 1, 5]]


def parsed(directory: Path, model_type: str, **fields: Any) -> Any:
    config = CONFIG_MAPPING[model_type](**{**SIZES, **EXPERTS, **LATENT, **INDEXER}).to_dict()
    config |= {"architectures": ["GlmMoeDsaForCausalLM" if model_type == "glm_moe_dsa" else "DeepseekV32ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return load_config(directory)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, {0, 1, 2, 3}),
        ({"index_topk_freq": 2}, {0, 1, 3}),
        ({"index_topk_pattern": "FSSF"}, {0, 3}),
        ({"indexer_types": ["full", "shared", "full", "shared"], "index_topk_freq": 1}, {0, 2}),
    ],
)
def test_layers_with_an_indexer(fields: dict[str, Any], layers: set[int], tmp_path: Path) -> None:
    config = parsed(tmp_path, "glm_moe_dsa", **{"indexer_types": None, **fields})
    assert config.latent.indexer.layers == layers
    assert (config.latent.size, config.latent.row_size, config.head_dim) == (24, 40, 40)


def test_a_stage_begins_with_an_indexer(tmp_path: Path) -> None:
    config = parsed(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared", "full", "shared"])
    require_indexers(config, 2)
    with pytest.raises(ModelError, match="the stage that begins with layer 1 would need what an earlier layer's"):
        require_indexers(config, 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"q_lora_rank": None}, "no 'q_lora_rank', of which the indexer makes its queries"),
        ({"index_head_dim": 4}, "'index_head_dim' is 4; it must be at least 'qk_rope_head_dim', which is 8"),
        ({"index_topk": 0}, "'index_topk' is 0; it must be a positive integer"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "must be 'full' or 'shared', and the first 'full'"),
        ({"indexer_types": ["full"]}, "each of the 4 must be"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        parsed(tmp_path, "deepseek_v32", **fields)


def test_an_indexer_in_blocks_of_fp8(tmp_path: Path) -> None:
    """As published checkpoints have it: the weights of its heads are not rounded."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    save(tmp_path / "full", "deepseek_v32", **{**INDEXER, **sizes, "index_head_dim": 32, "first_k_dense_replace": 3})
    quantization, rounded = FORMATS["fp8-blocks"]
    names = ("q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj", "indexer.wq_b", "indexer.wk")
    found = []

    def stored(module: str, weight: torch.Tensor) -> Any:
        found.append(module.rpartition("self_attn.")[2])
        return rounded(weight) if module.endswith(names) else None

    store(tmp_path / "full", tmp_path / "stored", quantization, stored)
    assert set(found) >= {*names, "indexer.weights_proj"}
    assert compare(tmp_path / "stored", "native") < 2e-6
