"""Experts and factors of tokens equal the choices of transformers' routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Mistral4Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kvrelay.engine.config.experts import Router, Scoring
from kvrelay.engine.models.routing import route

NUM_EXPERTS, TOP_K, HIDDEN = 12, 3, 32
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
GROUPS: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralTopKRouter, {}, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeTopKRouter, {"norm_topk_prob": True}, {}),
    "not_normalised": (Qwen3MoeConfig, Qwen3MoeTopKRouter, {"norm_topk_prob": False}, {"is_normalised": False}),
    "gpt_oss": (GptOssConfig, GptOssTopKRouter, {}, {}),
    "deepseek_v2": (
        DeepseekV2Config, DeepseekV2TopkRouter, {"topk_method": "group_limited_greedy"}, {**GROUPS, "is_normalised": False},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3TopkRouter, {}, {**GROUPS, "num_scoring": 2, "scoring": Scoring.SIGMOID}),
    "mistral4": (Mistral4Config, Mistral4TopkRouter, {}, {**GROUPS, "num_scoring": 2}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_experts_and_factors_are_those_of_transformers(kind: str) -> None:
    config_class, router_class, fields, facts = CASES[kind]
    torch.manual_seed(3)
    theirs = router_class(config_class(**SIZES, **fields))
    torch.nn.init.normal_(theirs.weight)
    hidden = torch.randn(50, HIDDEN)
    logits, bias = hidden @ theirs.weight.detach().T, None
    if kind == "gpt_oss":
        logits += torch.nn.init.normal_(theirs.bias).detach()
    if kind == "deepseek_v3":
        bias = torch.nn.init.normal_(theirs.e_score_correction_bias)
    expert_ids, factors = route(logits, Router(num_experts=NUM_EXPERTS, top_k=TOP_K, **facts), bias)
    dense = torch.zeros(50, NUM_EXPERTS).scatter(1, expert_ids, factors)
    with torch.no_grad():
        _, their_factors, their_ids = theirs(hidden)
    torch.testing.assert_close(dense, torch.zeros(50, NUM_EXPERTS).scatter(1, their_ids, their_factors))
