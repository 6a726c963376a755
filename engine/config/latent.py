"""The config of latent attention (MLA: DeepSeek-V2, 2024), as far as the forward pass needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes in elements.

    A token keeps ``rank`` numbers, from which all heads' keys and values are made, and a rotated part of the key.
    """

    rank: int
    rope_size: int  # size of the rotated part of keys and of each query head
    nope_size: int  # size of a head's part that is not rotated
    value_size: int  # of a head
    query_rank: int | None  # size of the latents that queries are made of; None: they are made of the hidden state
    is_interleaved: bool  # dimension 2 i is rotated with 2 i + 1; otherwise i with i + rope_size / 2
    score_scale: float

    @property
    def size(self) -> int:
        """Elements that a token keeps in a layer."""
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        """Elements of a query head, before it is projected into the latents' space."""
        return self.nope_size + self.rope_size

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], size: Callable[..., int], rope: RopeConfig, directory: str
    ) -> LatentConfig:
        """Parse a config.json. ``size`` reads a positive number from it. Raises ModelError."""
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
