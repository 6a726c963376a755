"""The families of models with our own forward pass: the facts in which they differ, by the class that a checkpoint names.

A family that differs only in these facts is one line here. What depends on one model's numbers is read from its ``config.json``
(:mod:`kvrelay.engine.config.model`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.engine.config.experts import Scoring


class Windows(enum.Enum):
    """Which layers attend within ``sliding_window``, if the config has one."""

    NONE = enum.auto()
    ALL = enum.auto()
    BY_LAYER = enum.auto()  # as ``layer_types`` says; without that, layers from ``max_window_layers`` on


class ExpertTensors(enum.Enum):
    """How a checkpoint has a layer's experts. In one tensor per product they are ``gate_up_proj`` and ``down_proj``."""

    SINGLE = enum.auto()  # a tensor for each expert and product
    TRANSPOSED = enum.auto()  # ``[experts, ins, outs]``, gate and up interleaved, with biases
    STACKED = enum.auto()  # ``[experts, outs, ins]``, gate before up, without biases


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """How a family names its experts, and how it routes. Tensor names are given without their layer."""

    intermediate_size: str = "moe_intermediate_size"  # key in config.json
    router: str = "mlp.gate"
    has_router_bias: bool = False
    experts: str = "mlp.experts"
    gate: str = "gate_proj"  # these three of single tensors
    up: str = "up_proj"
    down: str = "down_proj"
    tensors: ExpertTensors = ExpertTensors.SINGLE
    has_dense_layers: bool = False  # layers left out by ``decoder_sparse_step`` or in ``mlp_only_layers``
    # ``mlp_layer_types`` says which layers are "sparse"; without that, those from ``first_k_dense_replace`` on that
    # ``moe_layer_freq`` divides.
    has_first_dense: bool = False
    is_normalised: bool | None = None  # None: ``norm_topk_prob`` decides
    scoring: Scoring = Scoring.SOFTMAX
    is_wide: bool = False  # the router computes in float32
    # A tensor beside the router's weight: added where experts are chosen, not in the factors.
    choice_bias: str | None = None
    may_lack_choice_bias: bool = False  # a checkpoint without it means zeros
    has_groups: bool = False  # uses ``n_group`` and ``topk_group``, unless ``topk_method`` is greedy
    num_scoring: int = 1  # the best experts of a group, whose scores add up to the group's
    shared: str | None = None  # name of the ``n_shared_experts``, which are one MLP
    # A norm of what experts and shared ones add up to. Checkpoints may have one beside other MLPs, which do not use it.
    norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Where a checkpoint that also reads images has its text."""

    config: str  # key in config.json
    prefix: str  # of the names of its tensors
    towers: tuple[str, ...]  # prefixes of the other tensors, which are not loaded
    types: tuple[str, ...] = ()  # its possible types, if the checkpoint's class says too little
    gives_way: bool = False  # ``--backend auto`` takes transformers, which reads images, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's facts. The defaults are Llama's."""

    windows: Windows = Windows.NONE
    has_window_switch: bool = False  # the config has ``use_sliding_window``, which defaults to off
    has_qkv_bias: bool | None = None  # a bias for q, k and v but not for o; None: ``attention_bias`` decides for all
    may_have_o_bias: bool = True  # if not, ``attention_bias`` decides for q, k and v only
    has_qk_norm: bool | None = False  # None: ``use_qk_norm`` decides
    has_partial_rotary: bool = (
        False  # ``partial_rotary_factor`` says how much of a head rotates; in others it must be 1
    )
    has_sinks: bool = False
    has_clamped_swiglu: bool = False  # with ``swiglu_alpha`` and ``swiglu_limit``
    is_latent: bool = False  # latent attention (:mod:`kvrelay.engine.config.latent`)
    # Whether the indexer rotates dimension 2 i with 2 i + 1, unless ``indexer_rope_interleave`` says it; None: there is no indexer.
    is_indexer_interleaved: bool | None = None
    has_query_growth: bool = False  # by the position (:class:`kvrelay.engine.config.latent.QueryGrowth`)
    experts: ExpertFacts | None = None
    text: TextPart | None = None  # None: the checkpoint is nothing else
    # What keys mean that a ``config.json`` lacks, where transformers' class has another default than Llama's.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_DEEPSEEK_V3_EXPERTS = ExpertFacts(
    has_first_dense=True,
    scoring=Scoring.SIGMOID,
    is_wide=True,
    choice_bias="e_score_correction_bias",
    has_groups=True,
    num_scoring=2,
    shared="mlp.shared_experts",
)
_DEEPSEEK_V3 = Family(
    is_latent=True,
    experts=_DEEPSEEK_V3_EXPERTS,
    defaults={
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
)
_KIMI_K25 = replace(
    _DEEPSEEK_V3,
    text=TextPart(config="text_config", prefix="language_model.", towers=("vision_tower.", "mm_projector.")),
)
_MISTRAL4 = Family(
    is_latent=True,
    has_query_growth=True,
    experts=ExpertFacts(
        has_first_dense=True,
        tensors=ExpertTensors.STACKED,
        has_groups=True,
        num_scoring=2,
        shared="mlp.shared_experts",
    ),
    defaults={"norm_topk_prob": True},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows=Windows.ALL, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        windows=Windows.ALL,
        experts=ExpertFacts(
            intermediate_size="intermediate_size",
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
            is_normalised=True,
        ),
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "Qwen2ForCausalLM": Family(
        windows=Windows.BY_LAYER, has_window_switch=True, has_qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family(
        windows=Windows.BY_LAYER, has_window_switch=True, has_qk_norm=True, defaults={"sliding_window": 4096}
    ),
    "Qwen3MoeForCausalLM": Family(
        windows=Windows.ALL,
        has_window_switch=True,
        has_qk_norm=True,
        experts=ExpertFacts(has_dense_layers=True),
        defaults={"sliding_window": 4096},
    ),
    "GptOssForCausalLM": Family(
        windows=Windows.BY_LAYER,
        has_sinks=True,
        has_clamped_swiglu=True,
        experts=ExpertFacts(
            intermediate_size="intermediate_size",
            router="mlp.router",
            has_router_bias=True,
            tensors=ExpertTensors.TRANSPOSED,
            is_normalised=True,
        ),
        defaults={"sliding_window": 128, "rms_norm_eps": 1e-5},
    ),
    "DeepseekV2ForCausalLM": Family(
        is_latent=True,
        experts=ExpertFacts(
            has_first_dense=True,
            is_normalised=False,
            is_wide=True,
            has_groups=True,
            shared="mlp.shared_experts",
        ),
        defaults={"topk_method": "greedy"},
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": _KIMI_K25,  # in published checkpoints
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,  # transformers' name
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults={
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Glm4MoeForCausalLM": Family(
        may_have_o_bias=False,
        has_qk_norm=None,
        has_partial_rotary=True,
        experts=_DEEPSEEK_V3_EXPERTS,
        defaults={
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "AXK1ForCausalLM": replace(
        _DEEPSEEK_V3,
        experts=replace(_DEEPSEEK_V3_EXPERTS, may_lack_choice_bias=True, norm="post_mlp_layernorm"),
        defaults={**_DEEPSEEK_V3.defaults, "first_k_dense_replace": 1},
    ),
    "Mistral4ForCausalLM": _MISTRAL4,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL4,
        text=TextPart(
            config="text_config",
            prefix="language_model.",
            towers=("vision_tower.", "multi_modal_projector."),
            types=("mistral4",),
            gives_way=True,
        ),
    ),
    "YoutuForCausalLM": Family(is_latent=True, defaults={"tie_word_embeddings": True}),
}

_V3 = FAMILIES["DeepseekV3ForCausalLM"]
FAMILIES |= {
    "DeepseekV32ForCausalLM": replace(
        _V3,
        is_indexer_interleaved=False,
        defaults={**_V3.defaults, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    ),
    "GlmMoeDsaForCausalLM": replace(
        _V3,
        is_indexer_interleaved=True,
        defaults={
            **_V3.defaults,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "index_topk": 2048,
            "index_n_heads": 32,
            "index_head_dim": 128,
        },
    ),
}
