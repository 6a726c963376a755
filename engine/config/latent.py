"""What of latent attention (MLA: DeepSeek-V2, 2024) its forward pass must know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes in elements. A token keeps ``rank`` numbers, of which all heads' keys and values are made, and a rotated key part."""

    rank: int
    rope_size: int  # of the rotated part, of keys and of each query head
    nope_size: int  # of the part of a head that is not rotated
    value_size: int  # of a head
    query_rank: int | None  # queries are made of so many numbers; None: of the hidden state
    is_interleaved: bool  # dimension 2 i turns with 2 i + 1; else i with i + rope_size / 2
    score_scale: float

    @property
    def size(self) -> int:
        """What a token keeps in a layer."""
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        """Of a head, before it meets latents."""
        return self.nope_size + self.rope_size

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], size: Callable[..., int], rope: RopeConfig, directory: str
    ) -> LatentConfig:
        """From a config.json. ``size`` reads a positive number of it. Raises ModelError."""
        if config.get("attention_bias"):
            raise ModelError(f"{directory}: 'attention_bias' is not supported with latent attention")
        rope_size, nope_size = size("qk_rope_head_dim"), size("qk_nope_head_dim")
        if rope_size % 2:
            raise ModelError(f"{directory}: 'qk_rope_head_dim' is {rope_size}; it must be even")
        return cls(
            rank=size("kv_lora_rank"),
            rope_size=rope_size,
            nope_size=nope_size,
            value_size=size("v_head_dim"),
            query_rank=None if config.get("q_lora_rank") is None else size("q_lora_rank"),
            is_interleaved=bool(config.get("rope_interleave", True)),
            score_scale=rope.score_factor / math.sqrt(nope_size + rope_size),
        )
