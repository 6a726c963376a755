"""GGUF files become model directories with weights as the ``gguf`` package dequantises them, in bf16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvrelay.common.errors import ModelError
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.launcher.convert import convert_gguf

HIDDEN, MIDDLE, VOCAB = 256, 512, 260
# For each tensor of a layer: shape, type, and name in the directory.
STORED: dict[str, tuple[tuple[int, int], Type, str]] = {
    "attn_q": ((HIDDEN, HIDDEN), Type.Q4_K, "self_attn.q_proj"),
    "attn_k": ((128, HIDDEN), Type.Q6_K, "self_attn.k_proj"),
    "attn_v": ((128, HIDDEN), Type.Q8_0, "self_attn.v_proj"),
    "attn_output": ((HIDDEN, HIDDEN), Type.Q5_K, "self_attn.o_proj"),
    "ffn_gate": ((MIDDLE, HIDDEN), Type.Q4_0, "mlp.gate_proj"),
    "ffn_up": ((MIDDLE, HIDDEN), Type.Q3_K, "mlp.up_proj"),
    "ffn_down": ((HIDDEN, MIDDLE), Type.IQ4_XS, "mlp.down_proj"),
}
CONTROLS = ("<|im_end|>", "<|endoftext|>", "<|end|>")  # the last ids


def write_words(writer: gguf.GGUFWriter, template: str = "") -> None:
    """``VOCAB`` tokens, of which the last one ends a text."""
    letters = [chr(code) for code in range(33, 127)]
    words = letters + [first + second for first in "abcdefgh" for second in "abcdefghijklmnopqrstuvwxyz"]
    words = words[: VOCAB - len(CONTROLS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*words, *CONTROLS])
    writer.add_token_types([1] * len(words) + [3] * len(CONTROLS))
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words[len(letters) :]])
    writer.add_eos_token_id(VOCAB - 1)
    if template:
        writer.add_chat_template(template)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    path: Path,
    absent: tuple[str, ...] = (),
    more: Mapping[str, int] | None = None,
    turn_end: int = -1,
    template: str = "",
) -> dict[str, torch.Tensor]:
    """Write a tiny Qwen2 of random bytes without ``absent`` tensors, and with ``more`` of some sizes.

    Returns its weights as gguf dequantises them.
    """
    generator = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_layer_norm_rms_eps(1e-6)
    write_words(writer, template)
    if turn_end >= 0:
        writer.add_eot_token_id(turn_end)
    wanted: dict[str, torch.Tensor] = {}
    for name, (shape, kind, ours) in STORED.items():
        if name in absent:
            continue
        # No byte is large, so that no scale is infinite.
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        raw = generator.integers(0, 0x3C, (shape[0], shape[1] // block_size * type_size), dtype=np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=kind)
        wanted[f"model.layers.0.{ours}.weight"] = torch.from_numpy(gguf.dequantize(raw, kind))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    for name, size in (("attn_q", HIDDEN), ("attn_k", 128), ("attn_v", 128)):
        writer.add_tensor(f"blk.0.{name}.bias", np.ones(size, dtype=np.float32))
    for name in (one for one in ("token_embd", "output") if one not in absent):
        writer.add_tensor(f"{name}.weight", generator.standard_normal((VOCAB, HIDDEN)).astype(np.float16))
    for name, size in (more or {}).items():
        writer.add_tensor(name, np.ones(size, dtype=np.float32))
    finish(writer)
    return wanted


def write_model(path: Path, architecture: str, model_type: str, num_layers: int, **sizes: int) -> gguf.GGUFWriter:
    """A writer with all fields and tensors of a tiny random model, under the names of llama.cpp's converter."""
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **common, **heads, **sizes))
    writer = gguf.GGUFWriter(path, architecture)
    fields = {"context_length": 64, "block_count": num_layers, "embedding_length": 32, "feed_forward_length": 64}
    fields |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    fields |= {"attention.sliding_window": 2047, "expert_count": 4, "expert_used_count": 2}
    for name, value in fields.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        writer.add_float32(f"{architecture}.attention.{name}", 1e-5)
    writer.add_rope_freq_base(1e6)
    write_words(writer)
    writer.add_pad_token_id(0)
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, num_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):  # one tensor in a model, two in a file
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half))
            continue
        stem = name.removesuffix(".weight").removesuffix(".bias")
        found = names.get_name(stem)
        assert found is not None, name
        writer.add_tensor(found + (name.removeprefix(stem) or ".weight"), values)
    return writer


@pytest.mark.filterwarnings("ignore")  # warnings of transformers
def test_weights_are_those_that_gguf_dequantises(tmp_path: Path) -> None:
    wanted = write(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    held = load_file(tmp_path / "tiny" / "model.safetensors")
    for name, weight in wanted.items():
        assert torch.isfinite(weight).all()
        assert torch.equal(held[name], weight.bfloat16()), name
    assert (tmp_path / "tiny" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "tiny" / "config.json").read_text(encoding="utf-8"))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **scaling}


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_file_without_a_tensor_is_refused_unless_the_tensor_is_tied(tmp_path: Path) -> None:
    """Experts in a file of Llama's architecture (Mixtral) have other names; random numbers would take their place."""
    write(tmp_path / "tied.gguf", absent=("output",), more={"rope_freqs.weight": 32})
    convert_gguf(tmp_path / "tied.gguf", tmp_path / "tied")
    write(tmp_path / "broken.gguf", absent=("ffn_up",))
    with pytest.raises(ModelError, match="lacks 1 tensors of Qwen2ForCausalLM"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "broken")


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_file_with_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    """Granite's code models are files of Llama's architecture with biases, and StableLM 2 12B has norms of its heads."""
    write(tmp_path / "biased.gguf", more={"blk.0.attn_output.bias": HIDDEN})
    with pytest.raises(ModelError, match="some would be ignored; take the model's safetensors"):
        convert_gguf(tmp_path / "biased.gguf", tmp_path / "biased")
    writer = write_model(tmp_path / "normed.gguf", "stablelm", "stablelm", 1)
    writer.add_tensor("blk.0.attn_q_norm.weight", np.ones((4, 8), dtype=np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"StableLmForCausalLM only .* some would be ignored"):
        convert_gguf(tmp_path / "normed.gguf", tmp_path / "normed")
    assert not list(tmp_path.glob("*/config.json"))


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("architecture", "model_type", "num_layers", "sizes", "found"),
    [
        ("starcoder2", "starcoder2", 1, {}, {}),
        ("stablelm", "stablelm", 1, {}, {}),
        ("phi3", "phi3", 1, {}, {"sliding_window": 2047}),
        ("qwen3moe", "qwen3_moe", 1, {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}, {}),
        ("gemma2", "gemma2", 46, {"head_dim": 8}, {"query_pre_attn_scalar": 8}),
        ("gemma2", "gemma2", 2, {"head_dim": 8}, {"query_pre_attn_scalar": 256}),
        ("gemma3", "gemma3_text", 62, {"head_dim": 8}, {"query_pre_attn_scalar": 8}),
    ],
)
def test_what_the_library_does_not_read_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    model_type: str,
    num_layers: int,
    sizes: dict[str, int],
    found: dict[str, Any],
) -> None:
    """The base of rotations, Phi-3's window, and the scale of scores of Gemma's 27B, which only their layers tell."""
    # transformers makes the table of all layers' names again for each module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    finish(write_model(tmp_path / "tiny.gguf", architecture, model_type, num_layers, **sizes))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    config = AutoConfig.from_pretrained(tmp_path / "tiny")
    assert {name: getattr(config, name) for name in found} == found
    rotations = config.rope_parameters
    assert rotations.get("full_attention", rotations)["rope_theta"] == 1e6


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_all_tokens_that_end_a_turn_end_an_answer(tmp_path: Path) -> None:
    """Gemma's files name the end of a text but not that of a turn, which only the chat template writes."""
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    write(tmp_path / "chat.gguf", turn_end=7, template=template)
    convert_gguf(tmp_path / "chat.gguf", tmp_path / "chat")
    generation = json.loads((tmp_path / "chat" / "generation_config.json").read_text(encoding="utf-8"))
    text_end, written = VOCAB - 1, VOCAB - 3
    assert generation["eos_token_id"] == [7, written, text_end]
    assert sorted(Tokenizer.load(tmp_path / "chat").eos_ids) == [7, written, text_end]


def test_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "oss.gguf", "gpt-oss")
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    finish(writer)
    with pytest.raises(ModelError, match="no conversion reads gpt-oss rightly; take the model's safetensors"):
        convert_gguf(tmp_path / "oss.gguf", tmp_path / "oss")
