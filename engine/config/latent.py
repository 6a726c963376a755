"""The config of latent attention (MLA: DeepSeek-V2, 2024) and of its indexer, as far as the forward pass needs it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sparse attention (DSA: DeepSeek-V3.2, 2025): an indexer picks the latents that a token attends to.

    A token keeps one key of ``size`` numbers for it. The score of a key is the sum over the indexer's heads of
    ``weight * relu(query @ key)``.
    """

    topk: int  # tokens that it picks; a token that sees no more attends to all of them
    num_heads: int
    size: int  # elements of a head, and of the key
    is_interleaved: bool  # as in LatentConfig, of the indexer's queries and keys
    layers: frozenset[int]  # those that have an indexer; the others attend to what the last one before them has picked

    @classmethod
    def parse(
        cls,
        config: Mapping[str, Any],
        size: Callable[..., int],
        rope_size: int,
        directory: str,
        *,
        is_interleaved: bool,
    ) -> IndexerConfig:
        """Parse a config.json. ``size`` reads a positive number from it. ``is_interleaved``: what holds if it does not say.

        Raises ModelError.
        """
        if config.get("q_lora_rank") is None:
            raise ModelError(f"{directory}: config.json has no 'q_lora_rank', of which the indexer makes its queries")
        head_size = size("index_head_dim")
        if head_size < rope_size:
            raise ModelError(
                f"{directory}: 'index_head_dim' is {head_size}; it must be at least 'qk_rope_head_dim', which is {rope_size}"
            )
        return cls(
            topk=size("index_topk"),
            num_heads=size("index_n_heads"),
            size=head_size,
            is_interleaved=bool(config.get("indexer_rope_interleave", is_interleaved)),
            layers=_layers_with_indexer(config, size("num_hidden_layers"), directory),
        )


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with the position (Llama 4, 2025), by ``1 + beta * log(1 + floor(position / length))``."""

    beta: float
    length: int  # positions

    @classmethod
    def parse(cls, rope: RopeConfig, directory: str) -> QueryGrowth:
        """From the settings of rotations. Raises ModelError."""
        parameters = json.loads(rope.parameters)
        beta, length = (parameters.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
        if not isinstance(beta, int | float) or not isinstance(length, int) or length < 1:
            raise ModelError(
                f"{directory}: 'llama_4_scaling_beta' is {beta!r} and 'original_max_position_embeddings' {length!r} in "
                "'rope_parameters'; queries grow by these, so they must be a number and a positive integer"
            )
        return cls(float(beta), length)


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
    query_growth: QueryGrowth | None = None  # None: queries are the same at all positions
    indexer: IndexerConfig | None = None  # None: a token attends to all tokens that it sees

    @property
    def size(self) -> int:
        """Elements of a latent and the rotated part of the key."""
        return self.rank + self.rope_size

    @property
    def row_size(self) -> int:
        """Elements that a token keeps in a layer: ``size``, then the indexer's key."""
        return self.size + (0 if self.indexer is None else self.indexer.size)

    @property
    def query_size(self) -> int:
        """Elements of a query head, before it is projected into the latents' space."""
        return self.nope_size + self.rope_size

    @classmethod
    def parse(
        cls,
        config: Mapping[str, Any],
        size: Callable[..., int],
        rope: RopeConfig,
        directory: str,
        *,
        is_indexer_interleaved: bool | None = None,
        has_query_growth: bool = False,
    ) -> LatentConfig:
        """Parse a config.json. ``size`` reads a positive number from it. The others are facts of the family.

        Raises ModelError.
        """
        indexer: IndexerConfig | None = None
        if config.get("attention_bias"):
            raise ModelError(f"{directory}: 'attention_bias' is not supported with latent attention")
        rope_size, nope_size = size("qk_rope_head_dim"), size("qk_nope_head_dim")
        if rope_size % 2:
            raise ModelError(f"{directory}: 'qk_rope_head_dim' is {rope_size}; it must be even")
        if is_indexer_interleaved is not None:
            indexer = IndexerConfig.parse(config, size, rope_size, directory, is_interleaved=is_indexer_interleaved)
        return cls(
            rank=size("kv_lora_rank"),
            rope_size=rope_size,
            nope_size=nope_size,
            value_size=size("v_head_dim"),
            query_rank=None if config.get("q_lora_rank") is None else size("q_lora_rank"),
            is_interleaved=bool(config.get("rope_interleave", True)),
            score_scale=rope.score_factor / math.sqrt(nope_size + rope_size),
            query_growth=QueryGrowth.parse(rope, directory) if has_query_growth else None,
            indexer=indexer,
        )


def _layers_with_indexer(config: Mapping[str, Any], num_layers: int, directory: str) -> frozenset[int]:
    """From ``indexer_types``, else ``index_topk_pattern``, else every ``index_topk_freq``-th layer, as in GLM-5."""
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        every, offset = int(config.get("index_topk_freq") or 1), int(config.get("index_skip_topk_offset", 2))
        types = ["shared" if max(layer - offset + 1, 0) % max(every, 1) else "full" for layer in range(num_layers)]
    kinds = ["full" if one in ("full", "F") else "shared" if one in ("shared", "S") else one for one in types]
    if len(kinds) < num_layers or not {"full", "shared"}.issuperset(kinds) or kinds[0] != "full":
        raise ModelError(
            f"{directory}: the indexers of layers are {kinds}; each of the {num_layers} must be 'full' or 'shared', and the first "
            "'full'"
        )
    return frozenset(layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "full")
