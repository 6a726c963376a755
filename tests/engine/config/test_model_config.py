"""config.json of both transformers generations, and refused configurations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.experts import ClampedSwiglu
from kvrelay.engine.config.families import FAMILIES
from kvrelay.engine.config.model import load_config, parse_config
from kvrelay.engine.config.rope import inverse_frequencies
from tests.engine.conftest import SIZES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> Any:
    return parse_config({**LLAMA, **changes}, "/m")


def test_what_a_config_leaves_out() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "float32")
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not any((config.has_tied_embeddings, config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias))
    assert config.sliding_windows == (None,) * 4
    assert parse(num_key_value_heads=None, head_dim=None, rms_norm_eps=None).head_dim == 16
    assert parse(rope_parameters={"rope_type": "default", "partial_rotary_factor": None}).rope == config.rope


@pytest.mark.parametrize(
    "architecture", [name for name, family in FAMILIES.items() if family.defaults and family.text is None]
)
def test_missing_keys_mean_what_they_mean_to_transformers(architecture: str) -> None:
    if (model_class := getattr(transformers, architecture, None)) is None:
        pytest.skip("this transformers does not have the type yet")
    theirs = model_class.config_class(
        **({"use_sliding_window": True} if FAMILIES[architecture].has_window_switch else {})
    )
    known = {**vars(theirs), **theirs.rope_parameters}
    if "mlp_layer_types" in known:
        known["first_k_dense_replace"] = known["mlp_layer_types"].index("sparse")
    defaults = FAMILIES[architecture].defaults
    assert defaults == {name: known[name] for name in defaults}


def test_yarn_stretches_a_model_that_does_not_count_it() -> None:
    """Qwen2.5's recipe leaves ``max_position_embeddings`` as it is; gpt-oss counts what YaRN stretches."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse(rope_scaling=yarn, max_position_embeddings=2048).max_position_embeddings == 8192
    assert parse(rope_scaling=yarn, max_position_embeddings=10000).max_position_embeddings == 10000
    assert parse(rope_scaling=LLAMA3, max_position_embeddings=2048).max_position_embeddings == 2048


def test_rope_of_transformers_4_and_5_is_the_same() -> None:
    old = parse(rope_theta=500000.0, rope_scaling=LLAMA3)
    older = parse(rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    new = parse(rope_parameters={"rope_theta": 500000.0, **LLAMA3})
    assert old.rope == older.rope == new.rope
    assert old.rope.kind == "llama3"


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 1e6}])
@pytest.mark.parametrize("scaling", [LLAMA3, {}, None])
def test_of_both_ropes_the_one_is_taken_that_transformers_takes(
    scaling: dict[str, Any] | None, theta: dict[str, float]
) -> None:
    """A recipe's ``rope_scaling`` may be added to the config of a checkpoint that transformers 5 has written."""
    both = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "rope_scaling": scaling,
        **theta,
    }
    theirs = dict(transformers.LlamaConfig(**copy.deepcopy(both)).rope_parameters)
    ours = parse(**both).rope
    assert (ours.kind, ours.theta) == (theirs.pop("rope_type"), theirs.pop("rope_theta"))
    assert json.loads(ours.parameters) == theirs


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "truncate": False},
    ],
)
def test_frequencies_are_transformers(rope: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, **rope}
    theirs = transformers.LlamaConfig(**{**SIZES, "head_dim": 64, "rope_parameters": parameters})
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = parse(rope_parameters=parameters, max_position_embeddings=SIZES["max_position_embeddings"]).rope
    inv_freq, ours_factor = inverse_frequencies(ours, 64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert ours_factor == pytest.approx(factor)


def test_sliding_windows_per_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parse(**mistral, sliding_window=None).sliding_windows == (None,) * 4
    assert parse(**mistral).sliding_windows == (4096,) * 4
    assert parse(**mistral, sliding_window=64).sliding_windows == (64,) * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 3}
    assert parse(**qwen, use_sliding_window=False).sliding_windows == (None,) * 4
    assert parse(**qwen, use_sliding_window=True).sliding_windows == (None, None, None, 64)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(**qwen, use_sliding_window=True, layer_types=kinds).sliding_windows == (64, None) * 2


def test_layers_with_experts() -> None:
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    every = parse(**qwen).experts
    assert (every.layers, every.intermediate_size, every.router.is_normalised) == ({0, 1, 2, 3}, 16, False)
    assert parse(**qwen, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True).experts.layers == {1}
    assert parse(**qwen).intermediate_sizes == (16,)
    assert parse(**qwen, decoder_sparse_step=2).intermediate_sizes == (16, 128)
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    assert parse(**mixtral).experts.intermediate_size == 128
    with pytest.raises(ModelError, match="'num_experts_per_tok' is 9; the model has 8 experts"):
        parse(**{**mixtral, "num_experts_per_tok": 9})


def test_gpt_oss() -> None:
    gpt_oss = {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
    }
    with pytest.raises(ModelError, match=r"config\.json has no 'layer_types'"):
        parse(**gpt_oss)
    config = parse(**gpt_oss, layer_types=["sliding_attention", "full_attention"] * 2, swiglu_limit=5.0)
    assert (config.sliding_windows, config.has_sinks) == ((64, None) * 2, True)
    assert config.clamped_swiglu == ClampedSwiglu(1.702, 5.0)


def test_biases_by_architecture() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias, qwen2.has_qk_norm) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.has_qkv_bias, qwen3.has_o_bias, qwen3.has_qk_norm) == (True, True, True)
    glm = parse(architectures=["Glm4MoeForCausalLM"], attention_bias=True, use_qk_norm=True, **GLM_EXPERTS)
    assert (glm.has_qkv_bias, glm.has_o_bias, glm.has_qk_norm) == (True, False, True)
    glm = parse(architectures=["Glm4MoeForCausalLM"], **GLM_EXPERTS)
    assert (glm.has_qkv_bias, glm.has_o_bias, glm.has_qk_norm) == (False, False, False)


def test_how_much_of_a_head_rotates() -> None:
    """GLM-4.5 says it beside ``rope_scaling``, and a config that transformers 5 saves within ``rope_parameters``."""
    glm = {"architectures": ["Glm4MoeForCausalLM"], **GLM_EXPERTS}
    half, own = parse(**glm), parse(**glm, partial_rotary_factor=0.25)
    assert (half.rotary_size, own.rotary_size) == (8, 4)
    assert half.rope_text != own.rope_text
    new = parse(**glm, rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25})
    assert new.rope == own.rope
    for factor, reason in ((0.1, "1 of 16 dimensions rotate"), (2.0, "partial_rotary_factor is 2.0")):
        with pytest.raises(ModelError, match=reason):
            parse(**glm, partial_rotary_factor=factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; supported are LlamaForCausalLM, ",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu is"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported; supported are default, linear",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one per layer type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": None}}, "rope type 'llama3' needs 'high_freq_factor'"),
        ({"dtype": "float64"}, "dtype float64 is not supported"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 key/value heads"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_key_value_heads": "two"}, "'num_key_value_heads' is 'two'; it must be a positive integer"),
        ({"num_key_value_heads": -2}, "'num_key_value_heads' is -2"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small'; it must be a number"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"/m.*{message}"):
        parse(**changes)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).num_layers == 4


def test_what_a_fingerprint_has_of_the_rope_tells_models_apart() -> None:
    ours = parse().rope_text
    assert ours == parse(rms_norm_eps=1e-6).rope_text
    assert len({ours, parse(rope_theta=20000.0).rope_text, parse(rope_theta=10000.0001).rope_text}) == 3
