"""Allocates a model's empty parameters, and maps each tensor of a checkpoint to its place in them.

If a model is cut among ranks (:mod:`kvrelay.engine.config.cut`), only the rank's part is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.draft_layer import draft_layer
from kvrelay.engine.config.families import FAMILIES, ExpertFacts, ExpertTensors
from kvrelay.engine.config.latent import IndexerConfig
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.weights.parameters import (
    DraftLayerWeights,
    ExpertWeights,
    HeadWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    SparseWeights,
)
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight, Rounding, Weight
from kvrelay.engine.weights.targets import FusedExperts, Kept, Place


class VocabNames(NamedTuple):
    """Names of a checkpoint's tensors with a row for each token."""

    embedding: str
    head: str


_Part = tuple[str, int, range]  # of a matrix: name, rows in the checkpoint, and the rank's rows


def allocate(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding | None,
    cut: Cut,
    kept: Kept,
) -> tuple[ModelWeights, dict[str, Place | None]]:
    """Empty parameters, and the place of each checkpoint tensor; None: another rank has it. Tensors of other stages are left out.

    ``kept``: weights that stay stored, if all parts of a matrix do, in the same form.
    """
    allocator = _Allocator(config, dtype, device, rounding, cut, kept)
    layers = [allocator.layer(index) for index in cut.layers(config.num_layers)]
    is_head_tied = cut.is_last and config.has_tied_embeddings
    names = vocab_names(config)
    embed = allocator.of_vocab(names.embedding) if cut.is_first or is_head_tied else None
    norm = allocator.parameter(f"{text_prefix(config)}model.norm.weight", config.hidden_size) if cut.is_last else None
    lm_head = embed if is_head_tied else allocator.of_vocab(names.head) if cut.is_last else None
    if not config.has_draft_layer:
        return ModelWeights(embed, layers, norm, lm_head), allocator.places
    behind = _Allocator(draft_layer(config), dtype, device, rounding, cut, kept)
    draft = behind.draft_layer(config.num_layers)
    return ModelWeights(embed, layers, norm, lm_head, draft), allocator.places | behind.places


def text_prefix(config: ModelConfig) -> str:
    """What the names of all tensors of the model begin with; empty unless the checkpoint has more than text."""
    text = FAMILIES[config.architecture].text
    return "" if text is None else text.prefix


def vocab_names(config: ModelConfig) -> VocabNames:
    """The names of the tensors ``[vocab, hidden]``."""
    prefix = text_prefix(config)
    return VocabNames(f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight")


class _Allocator:
    """Allocates parameters and records the places of tensors."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Rounding | None,
        cut: Cut,
        kept: Kept,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._rounding = rounding
        self._cut = cut
        self._kept = kept
        self.places: dict[str, Place | None] = {}

    def layer(self, index: int, number: int | None = None) -> LayerWeights:
        """All parameters of one layer. ``number``: its number in the checkpoint; None: ``index``."""
        config = self._config
        layer = f"{text_prefix(config)}model.layers.{index if number is None else number}."
        has_experts = config.experts is not None and index in config.experts.layers
        return LayerWeights(
            input_norm=self.parameter(f"{layer}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{layer}self_attn.", index),
            post_norm=self.parameter(f"{layer}post_attention_layernorm.weight", config.hidden_size),
            mlp=self._sparse(layer) if has_experts else self._mlp(f"{layer}mlp.", config.intermediate_size),
            mlp_norm=self._mlp_norm(layer) if has_experts else None,
        )

    def draft_layer(self, number: int) -> DraftLayerWeights:
        """All parameters of the layer that drafts, which is layer 0 of the config. ``number``: its number in the checkpoint.

        Embedding and head are the model's. Checkpoints have copies of both beside the layer, which nobody reads.
        """
        layer, hidden = f"{text_prefix(self._config)}model.layers.{number}.", self._config.hidden_size
        return DraftLayerWeights(
            embed_norm=self.parameter(f"{layer}enorm.weight", hidden),
            hidden_norm=self.parameter(f"{layer}hnorm.weight", hidden),
            fuse=self._projection(layer, (("eh_proj", hidden, range(hidden)),), 2 * hidden, range(2 * hidden)),
            layer=self.layer(0, number),
            norm=self.parameter(f"{layer}shared_head.norm.weight", hidden),
        )

    def parameter(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that every rank has as a whole."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.places[name] = Place(tensor, shape, tuple(map(range, shape)))
        return tensor

    def of_vocab(self, name: str) -> torch.Tensor:
        """``[vocab, hidden]``, or the rank's rows of it."""
        vocab_size, hidden = self._config.vocab_size, self._config.hidden_size
        tokens, num_rows = self._cut.vocab(vocab_size), self._cut.vocab_part(vocab_size)
        tensor = torch.empty(num_rows, hidden, dtype=self._dtype, device=self._device)
        tensor[len(tokens) :].zero_()
        self.places[name] = Place(tensor[: len(tokens)], (vocab_size, hidden), (tokens, range(hidden)))
        return tensor

    def _attention(self, prefix: str, layer: int) -> HeadWeights | LatentWeights:
        latent = self._config.latent
        if latent is None:
            return self._heads(prefix)
        weights = self._latent(prefix)
        if latent.indexer is not None and layer in latent.indexer.layers:
            weights.indexer = self._indexer(f"{prefix}indexer.", latent.indexer, latent.query_rank)
        return weights

    def _heads(self, prefix: str) -> HeadWeights:
        config, cut = self._config, self._cut
        hidden, size = config.hidden_size, config.head_dim
        q_rows = _elements(cut.heads(config.num_q_heads), size)
        kv_rows = _elements(cut.heads(config.num_kv_heads), size)
        qkv_parts = (
            ("q_proj", config.q_size, q_rows),
            ("k_proj", config.kv_size, kv_rows),
            ("v_proj", config.kv_size, kv_rows),
        )
        return HeadWeights(
            qkv=self._projection(prefix, qkv_parts, hidden, range(hidden)),
            qkv_bias=self._packed_bias(prefix, qkv_parts) if config.has_qkv_bias else None,
            q_norm=self.parameter(f"{prefix}q_norm.weight", size) if config.has_qk_norm else None,
            k_norm=self.parameter(f"{prefix}k_norm.weight", size) if config.has_qk_norm else None,
            sinks=self._sinks(f"{prefix}sinks") if config.has_sinks else None,
            o=self._projection(prefix, (("o_proj", hidden, range(hidden)),), config.q_size, q_rows),
            o_bias=self._summed_bias(f"{prefix}o_proj.bias") if config.has_o_bias else None,
        )

    def _latent(self, prefix: str) -> LatentWeights:
        """Each rank has its query heads. Parameters that all heads share are on every rank."""
        config, latent, hidden = self._config, self._config.latent, self._config.hidden_size
        assert latent is not None, f"{config.architecture} attends by heads"
        heads, num_heads = self._cut.heads(config.num_q_heads), config.num_q_heads

        def whole(name: str, num_rows: int) -> AnyWeight:
            return self._projection(prefix, ((name, num_rows, range(num_rows)),), hidden, range(hidden))

        def of_heads(size: int) -> tuple[int, range]:
            return num_heads * size, _elements(heads, size)

        rank, query_rank, value_size = latent.rank, latent.query_rank, latent.value_size
        name, num_ins = ("q_proj", hidden) if query_rank is None else ("q_b_proj", query_rank)
        num_rows, rows = of_heads(latent.nope_size + value_size)
        kv_b = torch.empty(len(rows), rank, dtype=self._dtype, device=self._device)
        self.places[f"{prefix}kv_b_proj.weight"] = Place(kv_b, (num_rows, rank), (rows, range(rank)))
        has_query_rank = query_rank is not None
        return LatentWeights(
            q_a=whole("q_a_proj", num_ins) if has_query_rank else None,
            q_a_norm=self.parameter(f"{prefix}q_a_layernorm.weight", num_ins) if has_query_rank else None,
            q=self._projection(prefix, ((name, *of_heads(latent.query_size)),), num_ins, range(num_ins)),
            kv_a=whole("kv_a_proj_with_mqa", latent.size),
            kv_a_norm=self.parameter(f"{prefix}kv_a_layernorm.weight", rank),
            kv_b=kv_b,
            o=self._projection(prefix, (("o_proj", hidden, range(hidden)),), *of_heads(value_size)),
        )

    def _indexer(self, prefix: str, indexer: IndexerConfig, query_rank: int | None) -> IndexerWeights:
        hidden, size, num_rows = self._config.hidden_size, indexer.size, indexer.num_heads * indexer.size
        assert query_rank is not None, "an indexer's queries are made of latents"
        return IndexerWeights(
            q=self._projection(prefix, (("wq_b", num_rows, range(num_rows)),), query_rank, range(query_rank)),
            k=self._projection(prefix, (("wk", size, range(size)),), hidden, range(hidden)),
            k_norm=self.parameter(f"{prefix}k_norm.weight", size),
            k_norm_bias=self.parameter(f"{prefix}k_norm.bias", size),
            head_weights=self._wide(f"{prefix}weights_proj.weight", indexer.num_heads, hidden),
        )

    def _mlp(self, prefix: str, mid: int) -> MlpWeights:
        config = self._config
        middle, all_hidden = self._cut.columns(mid), range(config.hidden_size)
        gate_up_parts = (("gate_proj", mid, middle), ("up_proj", mid, middle))
        return MlpWeights(
            gate_up=self._projection(prefix, gate_up_parts, config.hidden_size, all_hidden),
            gate_up_bias=self._packed_bias(prefix, gate_up_parts) if config.has_mlp_bias else None,
            down=self._projection(prefix, (("down_proj", config.hidden_size, all_hidden),), mid, middle),
            down_bias=self._summed_bias(f"{prefix}down_proj.bias") if config.has_mlp_bias else None,
        )

    def _mlp_norm(self, layer: str) -> torch.Tensor | None:
        facts = FAMILIES[self._config.architecture].experts
        if facts is None or facts.norm is None:
            return None
        return self.parameter(f"{layer}{facts.norm}.weight", self._config.hidden_size)

    def _sinks(self, name: str) -> torch.Tensor:
        heads = self._cut.heads(self._config.num_q_heads)
        tensor = torch.empty(len(heads), dtype=self._dtype, device=self._device)
        self.places[name] = Place(tensor, (self._config.num_q_heads,), (heads,))
        return tensor

    def _sparse(self, layer: str) -> SparseWeights:
        config, experts, facts = self._config, self._config.experts, FAMILIES[self._config.architecture].experts
        assert experts is not None, f"{layer} of {config.architecture} has no experts"
        assert facts is not None, f"{config.architecture} has no experts"
        num_experts, router = experts.router.num_experts, f"{layer}{facts.router}"
        make = self._single_experts if facts.tensors is ExpertTensors.SINGLE else self._fused_experts
        return SparseWeights(
            router=self.parameter(f"{router}.weight", num_experts, config.hidden_size),
            router_bias=self.parameter(f"{router}.bias", num_experts) if facts.has_router_bias else None,
            choice_bias=None
            if facts.choice_bias is None
            else self._wide(f"{router}.{facts.choice_bias}", num_experts, is_optional=facts.may_lack_choice_bias),
            experts=make(f"{layer}{facts.experts}.", facts, num_experts, experts.intermediate_size),
            shared=self._mlp(f"{layer}{facts.shared}.", experts.shared_size) if facts.shared else None,
            first_expert=self._cut.experts(num_experts).start,
        )

    def _wide(self, name: str, *shape: int, is_optional: bool = False) -> torch.Tensor:
        """Float32 in a model of any dtype, because its last bits matter. Zeros unless the checkpoint has it."""
        tensor = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self.places[name] = Place(tensor, shape, tuple(map(range, shape)), is_optional=is_optional)
        return tensor

    def _single_experts(self, prefix: str, facts: ExpertFacts, num_experts: int, mid: int) -> ExpertWeights:
        """From separate tensors per expert."""
        hidden, middle, experts = (
            self._config.hidden_size,
            self._cut.expert_columns(mid),
            self._cut.experts(num_experts),
        )
        names = (facts.gate, facts.up, facts.down)
        self.places |= {f"{prefix}{expert}.{name}.weight": None for expert in range(num_experts) for name in names}
        gate_up = [(f"{expert}.{name}", mid, middle) for expert in experts for name in (facts.gate, facts.up)]
        down = [(f"{expert}.{facts.down}", hidden, range(hidden)) for expert in experts]
        return ExpertWeights(
            num_experts=len(experts),
            gate_up=self._projection(prefix, gate_up, hidden, range(hidden), in_order=True),
            gate_up_bias=None,
            down=self._projection(prefix, down, mid, middle, in_order=True),
            down_bias=None,
        )

    def _fused_experts(self, prefix: str, facts: ExpertFacts, num_experts: int, mid: int) -> ExpertWeights:
        """From one tensor for all experts, per product."""
        hidden, experts = range(self._config.hidden_size), self._cut.experts(num_experts)
        middle = self._cut.expert_columns(mid)
        is_transposed = facts.tensors is ExpertTensors.TRANSPOSED
        both = range(2 * middle.start, 2 * middle.stop)  # interleaved
        gates_and_ups = (both,) if is_transposed else (middle, range(mid + middle.start, mid + middle.stop))

        def bias(name: str, num_parts: int, outs: range, size: int) -> torch.Tensor:
            tensor = torch.empty(len(experts) * len(outs), dtype=self._dtype, device=self._device)
            self.places[f"{prefix}{name}_bias"] = Place(
                FusedExperts(tensor, num_parts, is_transposed), (num_experts, size), (experts, outs)
            )
            return tensor

        def matrix(
            name: str, num_parts: int, num_ins: int, ins: range, num_outs: int, pieces: Sequence[range]
        ) -> AnyWeight:
            full_name, num_rows = f"{prefix}{name}", len(experts) * sum(map(len, pieces))
            # All rows have the same form, so any rows of the rank's number will do.
            stored = self._kept.joined(((full_name, range(num_rows), ins),), self._device)
            weight = self._matrix(num_rows, len(ins)) if stored is None else stored
            fused, (read, held) = FusedExperts(weight, num_parts, is_transposed), self._read(num_ins, ins)
            shape = (num_ins, num_outs) if is_transposed else (num_outs, num_ins)
            first, *others = ((experts, *((read, outs) if is_transposed else (outs, read))) for outs in pieces)
            self.places[full_name] = Place(fused, (num_experts, *shape), first, held, tuple(others))
            return weight

        gate_up = matrix("gate_up_proj", 2 if is_transposed else 1, len(hidden), hidden, 2 * mid, gates_and_ups)
        down = matrix("down_proj", 1, mid, middle, len(hidden), (hidden,))
        if not is_transposed:
            return ExpertWeights(len(experts), gate_up, None, down, None)
        down_bias = None
        if self._cut.rank == 0 or self._cut.has_whole_experts:
            down_bias = bias("down_proj", 1, hidden, len(hidden))
        else:
            self.places[f"{prefix}down_proj_bias"] = None
        return ExpertWeights(len(experts), gate_up, bias("gate_up_proj", 2, both, 2 * mid), down, down_bias)

    def _projection(
        self, prefix: str, parts: Sequence[_Part], num_columns: int, columns: range, *, in_order: bool = False
    ) -> AnyWeight:
        """``in_order``: do not keep the stored form if its inputs are permuted."""
        named = [(f"{prefix}{name}.weight", rows, columns) for name, _, rows in parts]
        matrix: AnyWeight | None = self._kept.joined(named, self._device, in_order=in_order)
        if matrix is None:
            matrix = self._matrix(sum(len(rows) for _, _, rows in parts), len(columns))
        start, (read, held) = 0, self._read(num_columns, columns)
        for name, size, rows in parts:
            target = matrix[start : start + len(rows)]
            self.places[f"{prefix}{name}.weight"] = Place(target, (size, num_columns), (rows, read), held)
            start += len(rows)
        return matrix

    def _read(self, num_columns: int, columns: range) -> tuple[range, slice | None]:
        """The inputs to read for a rank's ``columns``, and which of them the rank keeps. Rounding needs whole rows."""
        if self._rounding is None or len(columns) == num_columns:
            return columns, None
        return range(num_columns), slice(columns.start, columns.stop)

    def _matrix(self, num_outs: int, num_ins: int) -> Weight:
        if self._rounding is None:
            return torch.empty(num_outs, num_ins, dtype=self._dtype, device=self._device)
        return RoundedWeight.empty((num_outs, num_ins), self._rounding, self._dtype, self._device)

    def _packed_bias(self, prefix: str, parts: Sequence[_Part]) -> torch.Tensor:
        tensor = torch.empty(sum(len(rows) for _, _, rows in parts), dtype=self._dtype, device=self._device)
        start = 0
        for name, size, rows in parts:
            self.places[f"{prefix}{name}.bias"] = Place(tensor[start : start + len(rows)], (size,), (rows,))
            start += len(rows)
        return tensor

    def _summed_bias(self, name: str) -> torch.Tensor | None:
        if self._cut.rank == 0:
            return self.parameter(name, self._config.hidden_size)
        self.places[name] = None
        return None


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
