"""Rotary position embedding: the supported settings, and their angles.

The frequency formulas are from the papers: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al. 2023).
The piecewise scaling was published with Llama 3.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.common.errors import ModelError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
SUPPORTED_ROPE_TYPES = tuple(_NEEDED)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings of a model; ``parameters`` is the checkpoint's own dictionary, as canonical JSON."""

    kind: str
    theta: float
    parameters: str
    fraction: float = 1.0  # of a head's dimensions, the first of which rotate

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], directory: str, share: float = 1.0, *, may_be_partial: bool = False
    ) -> RopeConfig:
        """Parse a config.json of transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

        If both generations' keys are there, ``rope_scaling`` counts, as in transformers. ``partial_rotary_factor`` may name
        ``share``, the share of a head's elements that the model rotates anyway. ``may_be_partial``: it may be any other than 1, and
        may stand beside these dictionaries.
        """
        parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
        kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
        parameters.pop("type", None)
        if kind not in SUPPORTED_ROPE_TYPES or "full_attention" in parameters:
            shown = kind if "full_attention" not in parameters else "one per layer type"
            raise ModelError(
                f"{directory}: rope type {shown!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        found = parameters.pop("partial_rotary_factor", None)
        if found is None and may_be_partial:
            found = config.get("partial_rotary_factor")
        fraction = 1.0 if found is None else float(found)
        if not may_be_partial:
            if fraction != 1.0 and not math.isclose(fraction, share, rel_tol=1e-6):
                raise ModelError(f"{directory}: partial_rotary_factor is {fraction}; only {share:g} is supported")
            fraction = 1.0  # heads hold what rotates apart, if anything does not
        if not 0 < fraction <= 1:
            raise ModelError(f"{directory}: partial_rotary_factor is {fraction}; it must be above 0, and at most 1")
        if kind in ("llama3", "yarn"):
            parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        for name in _NEEDED[kind]:
            if not isinstance(parameters.get(name), (int, float)):
                raise ModelError(f"{directory}: rope type {kind!r} needs {name!r} as a number")
        return cls(kind, theta, json.dumps(parameters, sort_keys=True), fraction)

    @property
    def score_factor(self) -> float:
        """Factor on attention's scores, for models that scale them by YaRN's ``mscale_all_dim`` (DeepSeek); else 1."""
        parameters = json.loads(self.parameters)
        mscale = parameters.get("mscale_all_dim")
        return (
            _yarn_scale(float(parameters["factor"]), float(mscale)) ** 2 if mscale and self.kind != "default" else 1.0
        )

    @property
    def stretched_len(self) -> int:
        """Positions that YaRN stretches the model to, which ``max_position_embeddings`` may not count; 0 without YaRN."""
        parameters = json.loads(self.parameters)
        return int(parameters["original_max_position_embeddings"] * parameters["factor"]) if self.kind == "yarn" else 0

    @property
    def canonical(self) -> str:
        """One line that is equal if and only if the settings are equal."""
        partial = "" if self.fraction == 1.0 else f" of {self.fraction!r}"
        return f"{self.kind} theta={self.theta!r} {self.parameters}{partial}"

    def rotary_size(self, head_dim: int) -> int:
        """How many dimensions of a head rotate."""
        return int(head_dim * self.fraction)


def cos_sin_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of all angles, both ``[max_positions, rotary_size // 2]`` fp32, multiplied by the attention factor."""
    inv_freq, factor = inverse_frequencies(rope, rope.rotary_size(head_dim))
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeConfig, rotary_size: int) -> tuple[torch.Tensor, float]:
    """(``[rotary_size // 2]`` fp32 inverse frequencies, factor on cos and sin). ``rotary_size``: dimensions that rotate."""
    parameters = json.loads(rope.parameters)
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    inv_freq = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / float(parameters["factor"]), 1.0
        case "llama3":
            return _llama3(inv_freq, parameters), 1.0
        case "yarn":
            return _yarn(inv_freq, parameters, rope.theta, rotary_size)
    raise AssertionError(f"rope type {rope.kind!r} passed the parser")


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    # Long wavelengths are interpolated and short ones kept. Those between are blended by the number of periods in the
    # original context.
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(
    inv_freq: torch.Tensor, parameters: Mapping[str, Any], theta: float, rotary_size: int
) -> tuple[torch.Tensor, float]:
    factor = float(parameters["factor"])
    original = float(parameters["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return rotary_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(float(parameters.get("beta_fast") or 32.0))
    high = dimension_of(float(parameters.get("beta_slow") or 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    ramp = ((torch.arange(rotary_size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)
    return scaled, float(attention_factor)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
