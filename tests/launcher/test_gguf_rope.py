"""What a GGUF file says of its rotations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvrelay.common.errors import ModelError
from kvrelay.launcher.gguf_file import GgufFile
from kvrelay.launcher.gguf_rope import rope_parameters

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"scaling.type": "yarn", "scaling.factor": 4.0}


def write(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any], architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.{name}", value)
    for name, values in {"output_norm.weight": [1.0], **tensors}.items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(theta: float) -> list[float]:
    """What llama.cpp's converter writes: by how much each frequency is divided."""
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters={**LLAMA3, "rope_theta": theta})
    )
    return [theta ** -(2 * place / 64) / scaled for place, scaled in enumerate(rotary.inv_freq.tolist())]


@pytest.mark.parametrize(
    ("fields", "tensors", "found"),
    [
        ({}, {}, {}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_freqs.weight": [1.0] * 32}, {}),
        ({"scaling.type": "linear", "scaling.factor": 8.0}, {}, {"rope_type": "linear", "factor": 8.0}),
        ({"freq_base": 1_000_000.0}, {}, {"rope_theta": 1_000_000.0}),
        (
            {"freq_base": 500_000.0},
            {"rope_freqs.weight": llama3_factors(500_000.0)},
            {**LLAMA3, "rope_theta": 500_000.0},
        ),
        (
            {**YARN, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0},
            {},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        ({**YARN, "scaling.yarn_ext_factor": 1.0}, {}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_base_and_scaling_are_kept(tmp_path: Path, fields: Any, tensors: Any, found: Any) -> None:
    assert rope_parameters(GgufFile(write(tmp_path / "one.gguf", fields, tensors))) == pytest.approx(found)


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"scaling.type": "longrope"}, {}),
        ({**YARN, "scaling.attn_factor": 1.2}, {}),
        ({**YARN, "scaling.yarn_attn_factor": 1.2}, {}),
        ({**YARN, "scaling.yarn_ext_factor": 0.5}, {}),
        ({**YARN, "scaling.yarn_log_multiplier": 0.1}, {}),
        ({}, {"rope_factors_long.weight": [2.0] * 32, "rope_factors_short.weight": [1.0] * 32}),
        ({"freq_base": 10_000.0}, {"rope_freqs.weight": llama3_factors(500_000.0)}),
    ],
)
def test_a_scaling_that_would_be_lost_is_refused(tmp_path: Path, fields: Any, tensors: Any) -> None:
    with pytest.raises(ModelError, match="take the model's safetensors"):
        rope_parameters(GgufFile(write(tmp_path / "one.gguf", fields, tensors)))


def test_a_scaling_that_transformers_knows_is_left_to_it(tmp_path: Path) -> None:
    """Gemma 4 rotates only some dimensions; its file divides the frequencies of the others by a huge number."""
    tensors = {"rope_freqs.weight": [1.0] * 8 + [1e30] * 24}
    assert rope_parameters(GgufFile(write(tmp_path / "one.gguf", {}, tensors, "gemma4"))) == {}
