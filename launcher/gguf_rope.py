"""How a GGUF file scales its rotary embedding, in the words of a Hugging Face ``config.json``.

transformers reads only the base of the rotations from a GGUF file. Without the rest, a model of long contexts would be another one.
The formats of llama.cpp's ``convert_hf_to_gguf.py``: linear and YaRN scaling are fields, and Llama 3's is a tensor of factors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError

_LLAMA3 = {
    # All published models with this scaling have these numbers, which the file does not tell; only their factors differ.
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_WITHOUT_US = ("gemma4", "gpt-oss")  # transformers knows how these scale


def rope_scaling(gguf: Path) -> dict[str, Any]:
    """The fields of ``rope_parameters`` besides the base; empty if transformers has all of them, or the rotations are not scaled.

    Raises ModelError if they are scaled in a way that is not known here.
    """
    from gguf import GGUFReader  # noqa: PLC0415 - only conversions need it

    reader = GGUFReader(gguf)

    def text(name: str) -> str | None:
        field = reader.get_field(name)
        return None if field is None else bytes(field.parts[-1]).decode()

    architecture = text("general.architecture")
    if architecture in _WITHOUT_US:
        return {}
    prefix = f"{architecture}.rope."

    def number(name: str, default: float) -> float:
        field = reader.get_field(prefix + name)
        return default if field is None else float(field.parts[-1][0])

    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    factors = tensors.pop("rope_freqs.weight", None)
    kind, factor = text(f"{prefix}scaling.type") or "none", number("scaling.factor", 1.0)
    if tensors or kind not in ("none", "linear", "yarn") or number("scaling.attn_factor", 1.0) != 1.0:
        names = ", ".join(sorted(tensors)) or f"rope.scaling.type {kind}"
        raise ModelError(f"{gguf} scales rotations by {names}, which no conversion keeps: take the model's safetensors")
    if factors is not None and (factors != 1).any():
        return _llama3(gguf, factors.tolist(), number("freq_base", 10_000.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    original = number("scaling.original_context_length", 0.0)
    return {
        "rope_type": kind,
        "factor": factor,
        **({"original_max_position_embeddings": int(original)} if original else {}),
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
