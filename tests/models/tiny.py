"""Tiny models with random weights, of every type that transformers generates text with.

A type's own configuration decides the meaning of most fields, so all types get the same sizes, and ``MORE`` adds what a type
needs. If a model comes out large, its sizes of experts or latents have other names, which are tried next.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto import modeling_auto

from .tiny_multimodal import multimodal_config, text_type

_CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
VOCAB = 199
MAX_PARAMETERS = 10_000_000
WINDOW = 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 2,
    "ffn_hidden_size": 96,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 96}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
_PER_LAYER: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

MORE: dict[str, dict[str, Any]] = {
    "mistral": _SLIDING,
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "mixtral": {**EXPERTS, **_SLIDING},
    "gemma2": {**_SLIDING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 40},
    "gemma3_text": {
        **_SLIDING,
        "query_pre_attn_scalar": 40,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma3n_text": {
        **_SLIDING,
        **_PER_LAYER,
        "laurel_rank": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**_SLIDING, **_PER_LAYER, "global_head_dim": 32},
    "phi3": _SLIDING,
    "gpt_oss": {**EXPERTS, **_SLIDING},
    "granite": {
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    "granitemoe": {**EXPERTS, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    "olmo3": _SLIDING,
    "cohere2": {**_SLIDING, "logit_scale": 0.25},
    "deepseek_v2": {**EXPERTS, **LATENT, "topk_method": "greedy"},
    "minicpm3": LATENT,
    "starcoder2": _SLIDING,
    "exaone4": {**_SLIDING, "sliding_window_pattern": 2},
    "mimo_v2_flash": {**EXPERTS, **_SLIDING, "v_head_dim": 16, "swa_v_head_dim": 16, "swa_head_dim": 16},
    "llama4_text": {
        **EXPERTS,
        "attention_chunk_size": WINDOW,
        "floor_scale": 5,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "gptj": {**_GPT, "rotary_dim": 8},
    "codegen": {**_GPT, "rotary_dim": 8},
    "gpt2": _GPT,
    "gpt-sw3": _GPT,
    "ctrl": {**_GPT, "dff": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_head": 4, "n_layer": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "bamba": {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "granitemoehybrid": {
        **EXPERTS,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "shared_intermediate_size": 32,
    },
    "lfm2": {"full_attn_idxs": [1, 3], "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": WINDOW},
    "minimax": {"layer_types": ["full_attention", "linear_attention"] * 2, **EXPERTS},
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
for _name in ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
              "roc_bert", "xlm-roberta", "xlm-roberta-xl"):  # fmt: skip
    MORE[_name] = {"is_decoder": True}
for _name in ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu", "longcat_flash"):
    MORE[_name] = {**EXPERTS, **LATENT}
MORE["mistral4"] = {
    **EXPERTS,
    **LATENT,
    "head_dim": LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
}
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
MORE["glm4_moe"] = {**EXPERTS, "use_qk_norm": True, "attention_bias": True}
MORE["deepseek_v32"] = {**EXPERTS, **LATENT, **_INDEXER}
MORE["glm_moe_dsa"] = {**EXPERTS, **LATENT, **_INDEXER, "indexer_types": ["full", "full", "shared", "full"]}
MORE["deepseek_v4"] = {
    **EXPERTS,
    **_INDEXER,
    **_SLIDING,
    "num_key_value_heads": 1,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "swiglu_limit": 0.5,
    "index_topk": 3,
    "num_hidden_layers": 5,
    "num_hash_layers": 2,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
}
MORE["qwen3_next"] = MORE["qwen3_5_text"] = MORE["qwen3_5_moe_text"] = {**EXPERTS, **_LINEAR}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
for _name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text", "glm4v_text", "glm46v_text",
              "glm_ocr_text", "paddleocr_vl_text"):  # fmt: skip
    MORE[_name] = {**EXPERTS, "rope_parameters": _ROPE}
MORE["glm4v_moe_text"] = {
    **EXPERTS,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
}
MORE["ernie4_5_vl_moe_text"] = {
    **EXPERTS,
    "moe_intermediate_size": [32, 16],
    "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
}
MORE["step3p5"] = {**EXPERTS, **_SLIDING, "share_expert_dim": 32}
MORE["lfm2_moe"] = {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}
MORE["kimi_linear"] = {
    **EXPERTS,
    **LATENT,
    "linear_attn_config": {"head_dim": 8, "num_heads": 4, "full_attn_layers": [2, 4], "kda_layers": [1, 3]},
}
MORE["bailing_hybrid"] = {**EXPERTS, **LATENT, "layer_group_size": 2}
MORE["nemotron_h"] = {
    **EXPERTS,
    "layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 8,
}
MORE["falcon_h1"] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
}
MORE["zamba2"] = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
}


class NotTinyError(Exception):
    """None of the tried configurations of a type gives a small model."""


def tiny_model(model_type: str, /, **changes: Any) -> PreTrainedModel:
    """A random model of the type, in float32. Norms, sinks and biases are random, too. Raises NotTinyError.

    ``changes``: fields of its configuration.
    """
    of_text = text_type(model_type)
    auto = AutoModelForCausalLM if model_type in _CAUSAL and of_text == model_type else AutoModelForMultimodalLM
    problem = ""
    for more in (MORE.get(of_text, {}), EXPERTS, {**EXPERTS, **LATENT}):
        fields = {**SIZES, **more, **changes}
        try:
            is_text = of_text == model_type
            config = CONFIG_MAPPING[model_type](**fields) if is_text else multimodal_config(model_type, fields)
            with torch.device("meta"):
                size = auto.from_config(config).num_parameters()
            if size > MAX_PARAMETERS:
                problem = f"{size} parameters"
                continue
            torch.manual_seed(0)
            model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        except Exception as error:  # a configuration class may raise anything at unknown fields
            problem = f"{type(error).__name__}: {error}"
            continue
        fill(model)
        return model
    raise NotTinyError(f"{model_type}: {problem}")


def fill(model: PreTrainedModel, seed: int = 1) -> None:
    """Random weights, so that everything has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 or "sink" in name:
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0))
            else:
                parameter.add_(noise * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            elif name.endswith("tid2eid"):  # experts by token id
                draws = torch.rand(len(buffer), model.config.num_local_experts, generator=generator)
                buffer.copy_(draws.argsort(dim=-1)[:, : buffer.shape[1]])


def text_types() -> list[str]:
    """All types that generate text in transformers."""
    return sorted({*_CAUSAL, *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """A greedy continuation by transformers, and its log probabilities ``[num_tokens, vocab]``."""
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, pad_token_id=0,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences[0, len(prompt) :].tolist(), torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
