"""Models with latents on the CPU, against transformers, which expands keys and values, for each variant of
checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.experts import Scoring
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.hf.text import auto_class
from kvrelay.engine.outline import compare
from kvrelay.engine.weights.checkpoint import check_files
from tests.models.tiny import EXPERTS, LATENT, SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
    "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MISTRAL4_ROPE = {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
GROUPS: dict[str, Any] = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2}),
    "v2": (
        "deepseek_v2",
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rope_parameters": YARN},
    ),
    "v3": ("deepseek_v3", {**GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_parameters": YARN}),
    "v3 by halves": ("deepseek_v3", {"rope_interleave": False, "first_k_dense_replace": 0}),
    "v3 dense": ("deepseek_v3", {"first_k_dense_replace": 4}),
    "glm-4.7-flash": ("glm4_moe_lite", {**GROUPS, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "a.x-k1": ("axk1", {**GROUPS, "rope_parameters": YARN}),
    # The longest sequence of the check has 42 tokens: queries grow five times.
    "mistral 4": ("mistral4", {**GROUPS, "head_dim": 24, "rope_parameters": MISTRAL4_ROPE}),
    # transformers loads zeros for a padding token, which the check's prompts have.
    "youtu": ("youtu", {"tie_word_embeddings": True, "pad_token_id": None}),
}


def save(directory: Path, model_type: str, **fields: Any) -> PreTrainedModel:
    """Save a random model in float32."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **EXPERTS, **LATENT, **fields})
    torch.manual_seed(5)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.3)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_expanded_keys_and_values(variant: str, tmp_path: Path) -> None:
    model_type, fields = VARIANTS[variant]
    save(tmp_path, model_type, **fields)
    assert compare(tmp_path, "native") < 2e-6


def test_what_config_json_tells(tmp_path: Path) -> None:
    model_type, fields = VARIANTS["v3"]
    save(tmp_path, model_type, **fields)
    config = load_config(tmp_path)
    assert config.latent is not None
    assert config.experts is not None
    assert (config.latent.size, config.latent.query_size, config.latent.query_rank) == (16 + 8, 16 + 8, 24)
    assert config.latent.score_scale == pytest.approx(24**-0.5 * (1 + 0.1 * 0.5 * 1.3862944) ** 2)
    router = config.experts.router
    assert (router.scoring, router.num_groups, router.top_groups, router.scale) == (Scoring.SIGMOID, 4, 2, 2.5)
    assert (config.experts.layers, config.experts.shared_size) == ({1, 2, 3}, 32)


def test_layers_that_draft_are_left_in_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_files(tmp_path, load_config(tmp_path))
    tensors["model.layers.5.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.5\.eh_proj\.weight is unknown to DeepseekV3ForCausalLM"):
        check_files(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention_bias": True}, "'attention_bias' is not supported with latent attention"),
        ({"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is 7; it must be even"),
        ({"kv_lora_rank": None}, "config.json has no 'kv_lora_rank'"),
        ({"n_group": 3, "topk_group": 1}, "'n_group' is 3; it must divide the 4 experts"),
        ({"n_group": 2, "topk_group": 3}, "'topk_group' is 3 of 2 groups with 2 experts each; that is too many"),
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, "leaves too few for the 3 experts of a token"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = {**CONFIG_MAPPING["deepseek_v3"](**{**SIZES, **EXPERTS, **LATENT}).to_dict(), **fields}
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        load_config(tmp_path)
