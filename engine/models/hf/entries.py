"""Runs the attention of DeepSeek-V4 (2026) over rows and entries in the pool (:mod:`kvrelay.engine.kv.entries`).

Every layer sees the last tokens through a sliding window. Some also see entries, each of which stands for a window of tokens:

    compressed sparse    an entry for 4 tokens, made of 8; an indexer picks the entries that a token sees
    heavily compressed   an entry for 128 tokens; a token sees all

transformers keeps the inputs of unfinished windows in a cache of its own, for sequences of equal length. So the layer's ``forward``
is replaced. Products, norms and rotations remain those of the layer's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import Window
from kvrelay.engine.config.model import EntrySizes, KvSizes
from kvrelay.engine.kv.entries import EntryStep

_TYPES = frozenset({"deepseek_v4"})
_SPARSE = "compressed_sparse_attention"
_PIECE_NUMBERS = 2**24  # numbers that a piece of the tokens gathers, or scores that it has


@dataclass(frozen=True, slots=True)
class CompressedLayers:
    """The layers of a model some of which compress their tokens, in order.

    In the pool each has a layer of rows that attention sees. If it compresses, a layer with what becomes entries follows.
    """

    modules: Sequence[Any]  # modules of attention

    @property
    def compressing(self) -> list[Any]:
        """Those that keep entries."""
        return [module for module in self.modules if module.compressor is not None]

    @property
    def entries(self) -> tuple[EntrySizes, ...]:
        """Of the layers that keep them. Behind an entry is the indexer's key for it."""
        return tuple(EntrySizes(one.compressor.compress_rate, _entry_size(one)) for one in self.compressing)

    @property
    def row_sizes(self) -> tuple[KvSizes, ...]:
        """Of the layers in the pool that keep rows."""
        found: list[KvSizes] = []
        for module in self.modules:
            found.append(KvSizes(1, module.head_dim, 0))
            if module.compressor is not None:
                found.append(KvSizes(1, 2 * _width(module) * _entry_size(module), 0))
        return tuple(found)

    def windows(self, of_attention: Sequence[Window | None]) -> tuple[Window | None, ...]:
        """Of the same layers. ``of_attention``: the windows of the layers' attention."""
        found: list[Window | None] = []
        for module, window in zip(self.modules, of_attention, strict=True):
            found.append(window)
            if module.compressor is not None:
                found.append(_width(module) * module.compressor.compress_rate)
        return tuple(found)


def require_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raises ModelError if a model of ``config`` compresses its tokens and cannot compute in ``dtype``."""
    if dtype == torch.float16 and config.get_text_config().model_type in _TYPES:
        raise ModelError(
            f"the number format is float16, in which transformers keeps some projections of {config.model_type} in float32 and "
            "cannot compute; choose --dtype bfloat16 or float32"
        )


def require_experts(directory: Path, model: nn.Module) -> None:
    """Raises ModelError if a table of the checkpoint sends a token to an expert that the model does not have."""
    for path, table in model.named_buffers():
        if not path.endswith(".tid2eid"):
            continue
        count = int(model.get_submodule(path.rpartition(".")[0]).num_experts)  # type: ignore[arg-type]
        wrong = ((table < 0) | (table >= count)).any(dim=-1).nonzero()
        if len(wrong):
            token = int(wrong[0])
            raise ModelError(
                f"{directory}: {path} sends token {token} to the experts {table[token].tolist()}, and a layer has {count}: the "
                "checkpoint is damaged, or of another model"
            )


def compressed_layers(modules: list[nn.Module], config: PreTrainedConfig) -> CompressedLayers | None:
    """The model's ``modules`` of attention, if it is of a type that compresses."""
    return CompressedLayers(modules) if config.get_text_config().model_type in _TYPES else None


def keep_entries(layers: CompressedLayers, step_entries: Callable[[], EntryStep | None]) -> None:
    """Replace the forward passes of attention.

    ``step_entries``: those of the step under way; None outside of steps, when a layer computes as transformers does.
    """
    number = 0
    for index, module in enumerate(layers.modules):
        layer, compressed = index + number, None
        if module.compressor is not None:
            compressed = _Compressed(module, layer + 1, number)
            number += 1
        _replace_forward(module, layer, compressed, step_entries)


def _replace_forward(
    module: Any, layer: int, compressed: _Compressed | None, step_entries: Callable[[], EntryStep | None]
) -> None:
    plain = module.forward

    @functools.wraps(plain)  # keeps its signature
    def forward(hidden_states: torch.Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        step = step_entries()
        if step is None:
            return plain(hidden_states, position_embeddings, *args, **kwargs)
        hidden = hidden_states[0]
        cos, sin = (one[0] for one in position_embeddings[module.rope_layer_type])
        residual = module.q_a_norm(module.q_a_proj(hidden))
        query = module.q_b_norm(module.q_b_proj(residual).view(len(hidden), -1, module.head_dim))
        query = _rotated(query, cos[:, None], sin[:, None])
        step.write_rows(_rotated(module.kv_norm(module.kv_proj(hidden)), cos, sin), layer)
        seen = None
        if compressed is not None:
            compressed.write(hidden, step)
            seen = compressed.seen(hidden, residual, step)
        out = _attend(module, query, layer, seen, compressed, step)
        # A row is key and value in one, so the sum of values is rotated back.
        out = _rotated(out, cos[:, None], -sin[:, None])
        grouped = module.o_a_proj(out.reshape(1, len(out), module.config.o_groups, -1)).flatten(2)
        return module.o_b_proj(grouped), None

    module.forward = forward


@dataclass(frozen=True, slots=True)
class _Seen:
    """The entries that tokens see."""

    numbers: torch.Tensor  # [num_tokens, n] which entries of the sequence
    is_seen: torch.Tensor  # [num_tokens, n]


class _Compressed:
    """What a layer does with its entries."""

    def __init__(self, module: Any, layer: int, number: int) -> None:
        """``layer``: of the pool, with the rows that become entries. ``number``: among the layers that keep entries."""
        self._module, self._compressor = module, module.compressor
        self._indexer = module.compressor.indexer if module.layer_type == _SPARSE else None
        self._layer, self._number = layer, number
        self._rate: int = self._compressor.compress_rate

    def write(self, hidden: torch.Tensor, step: EntryStep) -> None:
        """Write the rows of the tokens ``[num_tokens, hidden]``, and the entries of the windows that they end."""
        parts = [self._compressor] if self._indexer is None else [self._compressor, self._indexer]
        rows = torch.cat([product(hidden) for one in parts for product in (one.kv_proj, one.gate_proj)], dim=-1)
        step.write_rows(rows, self._layer)
        ending = step.ending[self._rate]
        if not len(ending):
            return
        rows, is_there = step.rows_before(ending, _width(self._module) * self._rate, self._layer)
        first = step.positions[ending] + 1 - self._rate
        entries, start = [], 0
        for one in parts:
            size = _width(self._module) * one.head_dim
            kv, gate = rows[..., start : start + 2 * size].chunk(2, dim=-1)
            entries.append(self._entries(one, kv, gate, is_there, first))
            start += 2 * size
        step.write_entries(torch.cat(entries, dim=-1), self._number)

    def _entries(
        self, part: Any, kv: torch.Tensor, gate: torch.Tensor, is_there: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """``[n, size]`` of ``kv`` and ``gate``, both ``[n, tokens of an entry, width]``. ``first``: the entries' positions."""
        bias, size = part.position_bias, part.head_dim
        if self._indexer is not None:  # the first half of a row is for the next window's entry, the second for its own
            bias = torch.cat((bias[:, :size], bias[:, size:]))
            kv, gate = (torch.cat((x[:, : self._rate, :size], x[:, self._rate :, size:]), dim=1) for x in (kv, gate))
        weights = (gate + bias).masked_fill(~is_there[..., None], -torch.inf)
        mixed = (kv * weights.softmax(dim=1, dtype=torch.float32).to(kv.dtype)).sum(dim=1)
        entries = part.kv_norm(mixed)
        cos, sin = part.rotary_emb(entries[None], position_ids=first[None], layer_type=part.rope_layer_type)
        return _rotated(entries, cos[0], sin[0])

    def seen(self, hidden: torch.Tensor, residual: torch.Tensor, step: EntryStep) -> _Seen | None:
        """The entries that each token sees; None if none does."""
        most = max(step.seq_lens) // self._rate
        if most == 0:
            return None
        complete = (step.positions + 1) // self._rate
        if self._indexer is None or most <= self._indexer.index_topk:
            numbers = torch.arange(most, device=hidden.device).expand(len(hidden), -1)
            return _Seen(numbers, numbers < complete[:, None])
        picked = self._picked(hidden, residual, complete, step)
        return _Seen(picked, picked < complete[:, None])

    def _picked(
        self, hidden: torch.Tensor, residual: torch.Tensor, complete: torch.Tensor, step: EntryStep
    ) -> torch.Tensor:
        """The entries ``[num_tokens, topk]`` with the highest scores; incomplete ones where there are fewer."""
        indexer: Any = self._indexer
        size, scorer = indexer.head_dim, indexer.scorer
        cos, sin = indexer.rotary_emb(
            hidden[None], position_ids=step.positions[None], layer_type=indexer.rope_layer_type
        )
        query = _rotated(indexer.q_b_proj(residual).view(len(hidden), -1, size), cos[0, :, None], sin[0, :, None])
        # Of all tokens at once, as every product: an adapter knows a step's tokens by their places.
        weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
        picked = []
        for row, (start, end) in enumerate(pairwise(step.bounds)):
            count = max(step.seq_lens[row] // self._rate, indexer.index_topk)
            numbers = torch.arange(count, device=hidden.device)
            there = numbers.clamp(max=max(0, step.seq_lens[row] // self._rate - 1))
            keys = step.entries(torch.full_like(there, row), there, self._number)[:, -size:].float()
            piece = max(1, _PIECE_NUMBERS // (query.shape[1] * count))
            for first in range(start, end, piece):
                part = slice(first, min(first + piece, end))
                of_heads = (query[part].float() @ keys.T).relu_().mul_(scorer.softmax_scale)  # [tokens, heads, count]
                scores = (of_heads * weights[part, :, None]).sum(dim=1)
                scores.masked_fill_(numbers >= complete[part, None], -torch.inf)
                # Of equal scores the first entries, by every algorithm and in every batch.
                order = scores.sort(dim=-1, descending=True, stable=True).indices
                picked.append(order[:, : indexer.index_topk])
        return torch.cat(picked)

    def read(self, tokens: slice, seen: _Seen, step: EntryStep) -> torch.Tensor:
        """The entries ``[n, number of entries, head_dim]`` that tokens see; zeros in place of those that they do not see."""
        is_seen = seen.is_seen[tokens]
        rows = step.row_of_token[tokens, None].expand_as(is_seen)
        numbers = seen.numbers[tokens].masked_fill(~is_seen, 0)
        found = step.entries(rows, numbers, self._number)[..., : self._module.head_dim]
        return found.masked_fill(~is_seen[..., None], 0.0)


def _attend(
    module: Any,
    query: torch.Tensor,
    layer: int,
    seen: _Seen | None,
    compressed: _Compressed | None,
    step: EntryStep,
) -> torch.Tensor:
    """``query`` ``[num_tokens, num_heads, head_dim]`` in the same shape. Gathers what each token sees; sums are in fp32."""
    out = torch.empty_like(query)
    window = step.pool.groups.windows[step.pool.groups.places[layer][0]]
    longest = min(max(step.seq_lens), window) if isinstance(window, int) else max(step.seq_lens)
    num_seen = longest + (0 if seen is None else seen.numbers.shape[1])
    piece = max(1, _PIECE_NUMBERS // (num_seen * max(query.shape[1:])))
    all_tokens = torch.arange(len(query), device=query.device)
    for first in range(0, len(query), piece):
        tokens = slice(first, min(first + piece, len(query)))
        rows, is_seen = step.rows_before(all_tokens[tokens], longest, layer)
        if seen is not None and compressed is not None:
            rows = torch.cat((rows, compressed.read(tokens, seen, step)), dim=1)
            is_seen = torch.cat((is_seen, seen.is_seen[tokens]), dim=1)
        rows = rows.float()
        scores = torch.bmm(query[tokens].float(), rows.mT).mul_(module.scaling)
        scores.masked_fill_(~is_seen[:, None], -torch.inf)
        sinks = module.sinks.float()[None, :, None].expand(len(rows), -1, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        out[tokens] = torch.bmm(weights, rows).to(out.dtype)
    return out


def _rotated(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours among the last numbers. ``cos`` and ``sin`` have one for each pair, and broadcast."""
    count = 2 * cos.shape[-1]
    pairs = vectors[..., -count:].float()
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((vectors[..., :-count], turned.to(vectors.dtype)), dim=-1)


def _width(module: Any) -> int:
    """Windows of tokens of which an entry is made."""
    return 2 if module.layer_type == _SPARSE else 1


def _entry_size(module: Any) -> int:
    """Elements of an entry and of its key."""
    return int(module.head_dim + (module.compressor.indexer.head_dim if module.layer_type == _SPARSE else 0))
