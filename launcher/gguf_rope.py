"""How a GGUF file sets its rotary embedding, in the words of a Hugging Face ``config.json``.

transformers reads only the base of the rotations from a GGUF file, and of StarCoder2 and StableLM not even that. Without the
rest, a model would be another one.
The formats of llama.cpp's ``convert_hf_to_gguf.py``: linear and YaRN scaling are fields, and Llama 3's is a tensor of factors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.launcher.gguf_file import GgufFile

_LLAMA3 = {
    # All published models with this scaling have these numbers, which the file does not tell; only their factors differ.
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_WITHOUT_US = ("gemma4",)  # transformers knows how these scale
# Fields without a counterpart in a config.json, with the number that changes nothing.
_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """The fields of ``rope_parameters`` that ``file`` tells: base and scaling. Empty if transformers reads all of them.

    Raises ModelError if the rotations are scaled in a way that is not known here.
    """
    if file.architecture in _WITHOUT_US:
        return {}
    theta = file.number(f"{file.architecture}.rope.freq_base", 0.0)
    return {**({"rope_theta": theta} if theta else {}), **_scaling(file)}


def _scaling(file: GgufFile) -> dict[str, Any]:
    prefix = f"{file.architecture}.rope."

    def number(name: str, default: float) -> float:
        return file.number(prefix + name, default)

    tensors = {name: tensor.data for name, tensor in file.tensors.items() if name.startswith("rope_")}
    factors = tensors.pop("rope_freqs.weight", None)
    kind, factor = file.text(f"{prefix}scaling.type") or "none", number("scaling.factor", 1.0)
    lost = sorted(tensors)
    lost += [
        f"rope.scaling.{name} {value:g}"
        for name, neutral in _NEUTRAL.items()
        if (value := number(f"scaling.{name}", neutral)) != neutral
    ]
    if kind not in ("none", "linear", "yarn"):
        lost.append(f"rope.scaling.type {kind}")
    if lost:
        raise ModelError(
            f"{file.path} scales rotations by {', '.join(lost)}, which no conversion keeps: take the model's safetensors"
        )
    if factors is not None and (factors != 1).any():
        return _llama3(file.path, factors.tolist(), number("freq_base", 10_000.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    original = number("scaling.original_context_length", 0.0)
    betas = {name: number(f"scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
    return {
        "rope_type": kind,
        "factor": factor,
        **({"original_max_position_embeddings": int(original)} if original else {}),
        **{name: beta for name, beta in betas.items() if beta},
    }


def _llama3(gguf: Path, factors: list[float], theta: float) -> dict[str, Any]:
    """The scaling whose frequencies are divided by ``factors``. Raises ModelError if Llama 3's is not."""
    import torch  # noqa: PLC0415 - seconds to import

    from kvrelay.engine.config.rope import RopeConfig, inverse_frequencies  # noqa: PLC0415 - imports torch

    found = {**_LLAMA3, "factor": max(factors)}
    plain, scaled = (
        inverse_frequencies(RopeConfig(kind, theta, json.dumps(found)), 2 * len(factors))[0]
        for kind in ("default", "llama3")
    )
    if not torch.allclose(plain / scaled, torch.tensor(factors), rtol=1e-3):
        raise ModelError(
            f"{gguf} scales rotations by a rope_freqs.weight that is not Llama 3's: take the model's safetensors"
        )
    return found
