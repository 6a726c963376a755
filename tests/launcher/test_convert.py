"""GGUF files become model directories with weights as the ``gguf`` package dequantises them, in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from kvrelay.common.errors import ModelError
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


def write(path: Path, absent: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Write a tiny Qwen2 of random bytes without ``absent`` tensors. Returns its weights as gguf dequantises them."""
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
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(code) for code in range(33, 127)]
    words = letters + [first + second for first in "abcdefgh" for second in "abcdefghijklmnopqrstuvwxyz"]
    writer.add_token_list([*words[: VOCAB - 1], "<|end|>"])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words[len(letters) : VOCAB - 1]])
    writer.add_eos_token_id(VOCAB - 1)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


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
    write(tmp_path / "tied.gguf", absent=("output",))
    convert_gguf(tmp_path / "tied.gguf", tmp_path / "tied")
    write(tmp_path / "broken.gguf", absent=("ffn_up",))
    with pytest.raises(ModelError, match="lacks 1 tensors of Qwen2ForCausalLM"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "broken")
