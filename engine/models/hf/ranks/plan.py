"""What transformers' plan for a type (``base_model_tp_plan``) says about layers and parameters.

Nothing in a plan is trusted: kinds that we do not know are refused by name, and the check at load compares logits.
"""

from __future__ import annotations

import enum
import re

from transformers import CONFIG_MAPPING, PreTrainedConfig

# Types of decoders without a plan, and the types with one that have the same layers.
_SAME_LAYERS = {"qwen3_vl_text": "qwen3"}


def _layers(path: str, by_outputs: str, by_inputs: str) -> dict[str, str]:
    """Entries for layers of the module at ``path`` of each decoder layer."""
    kinds = dict.fromkeys(by_outputs.split(), "colwise") | dict.fromkeys(by_inputs.split(), "rowwise")
    return {f"layers.*.{path}.{name}": kind for name, kind in kinds.items()}


def _mlp(path: str) -> dict[str, str]:
    return _layers(path, "gate_proj up_proj", "down_proj")


_HEADS = _layers("self_attn", "q_proj k_proj v_proj", "o_proj")
_LATENT_HEADS = _layers("self_attn", "q_proj q_b_proj kv_b_proj", "o_proj")
# What transformers' plan for a type leaves out although it can be cut: attention by heads, and what computes all tokens beside
# experts. The tests run each type.
_LEFT_OUT: dict[str, dict[str, str]] = {
    "afmoe": _HEADS | _layers("self_attn", "gate_proj", "") | _mlp("mlp") | _mlp("mlp.shared_experts"),
    "axk1": _LATENT_HEADS,
    "bailing_hybrid": _LATENT_HEADS | _layers("self_attn", "g_proj", ""),
    "deepseek_v3": _LATENT_HEADS,  # the decoder of kimi_k25
    "exaone_moe": _mlp("mlp.shared_experts"),
    "glm4_moe_lite": _layers("self_attn", "q_proj", "") | _mlp("mlp.shared_experts"),
    "granitemoe": _HEADS,
    "granitemoehybrid": _HEADS,
    "granitemoeshared": _HEADS,
    "hunyuan_v1_moe": _HEADS | _mlp("mlp.shared_mlp"),
    "kimi_linear": _LATENT_HEADS,
    "lfm2_moe": _layers("self_attn", "q_proj k_proj v_proj", "out_proj") | _layers("feed_forward", "w1 w3", "w2"),
    "mistral4": _LATENT_HEADS,
    "nemotron_h": _layers("mixer", "q_proj k_proj v_proj up_proj", "o_proj down_proj")
    | _layers("mixer.shared_experts", "up_proj", "down_proj"),
    "phimoe": _HEADS,
    "qwen2_moe": _mlp("mlp.shared_expert"),
    "solar_open": _mlp("mlp.shared_experts"),
    "youtu": _LATENT_HEADS,
}


class Kind(enum.Enum):
    """What ranks do with a layer, a module or a parameter."""

    BY_OUTPUTS = "colwise"
    BY_INPUTS = "rowwise"  # the ranks' results are summed
    OUTPUTS_OF_TWO = "packed_colwise"  # by outputs, of which two halves lie one behind the other
    LAST_OF_TWO = "packed_rowwise"  # the same, of a transposed matrix
    GATHERED = "colwise_gather_output"  # by outputs, which ranks then gather
    SPLIT = "rowwise_split_input"  # by inputs, of which every rank has all
    EXPERTS = "moe_tp_experts"  # a module with parts of experts; its results are summed
    IDENTITY = "moe_identity_expert"  # an expert without parameters, whose result must count once
    WHOLE = "whole"


_WHOLE = {
    "replicated_with_grad_allreduce",  # only matters for training
    "mla_kv_a_proj",  # makes the latents of all heads
    "embedding_rowwise",
    "local_params",  # about the form of a module's parameters, which have entries of their own
}


class Plan:
    """The plan for a type of decoders."""

    def __init__(self, entries: dict[str, str]) -> None:
        """``entries``: kinds by patterns of paths in the decoder, as transformers has them."""
        self._entries = [(re.compile(re.escape(path).replace(r"\*", r"\d+")), kind) for path, kind in entries.items()]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Plan | None:
        """transformers' plan for a text model's ``config``, and what it leaves out; None if there is none."""
        plan: dict[str, str] | None = config.base_model_tp_plan
        if plan is None and config.model_type in _SAME_LAYERS:
            plan = CONFIG_MAPPING[_SAME_LAYERS[config.model_type]].base_model_tp_plan
        return cls(_LEFT_OUT.get(config.model_type, {}) | plan) if plan else None

    def kind_of(self, path: str) -> Kind | None:
        """The kind of what is at ``path`` in the decoder; None if the plan does not name it.

        Raises ValueError on an unknown kind.
        """
        word = next((kind for pattern, kind in self._entries if pattern.fullmatch(path)), None)
        if word is None:
            return None
        return Kind.WHOLE if word in _WHOLE else Kind(word)
