"""The operations on the CPU in plain vectorised torch: for every dtype, and without a compiler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cpu.attention import AttentionPlan
from kvrelay.engine.backends.cpu.experts import CpuExperts, SplitLinear
from kvrelay.engine.backends.cpu.linear import Int8Linear, PackedLinear, PlainLinear, has_packed_linear
from kvrelay.engine.backends.cpu.pool_rows import GatherScratch
from kvrelay.engine.backends.cpu.sparse_attention import PickedLatents
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.config.rope import cos_sin_tables
from kvrelay.engine.kv.entries import EntryPool, EntryStep
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.kv.states import StatePool, StateStep
from kvrelay.engine.kv.views import GroupKv, view_groups
from kvrelay.engine.models.low_rank import LowRankProducts, TorchLowRank
from kvrelay.engine.models.ops import PLAIN, Activation, Experts, IndexQueries, Linear, Scores
from kvrelay.engine.sampling.bitmask import apply_bitmask
from kvrelay.engine.sampling.draw import draw_tokens
from kvrelay.engine.sampling.penalties import Penalties, penalize
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Ints
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight


class KvWriter:
    """Writes one group's keys and values, or latents, into the pool."""

    def __init__(self, slot_mapping: Ints, kv: GroupKv) -> None:
        """``slot_mapping``: of this group."""
        sizes, block_size, self._unit = kv.sizes, kv.block_size, kv.unit
        # The unit of copying: the largest number of elements that divides both kinds' sizes and start offsets.
        self._flat_pool = kv.keys.as_strided(
            (len(kv.keys) * kv.block_stride // self._unit, self._unit), (self._unit, 1)
        )
        self._rows_per_layer = kv.layer_stride // self._unit
        blocks, offsets = np.divmod(slot_mapping, block_size)
        first, rows, start = blocks * (kv.block_stride // self._unit), [], 0
        for size in filter(None, (sizes.key_size, sizes.value_size)):
            units = size // self._unit
            of_heads = start + np.arange(sizes.num_kv_heads)[:, None] * (block_size * units) + np.arange(units)
            rows.append(((first + offsets * units)[:, None] + of_heads.reshape(-1)).reshape(-1))
            start += sizes.num_kv_heads * block_size * units
        # Rows of the flat pool in layer 0: all tokens' keys, then all their values.
        self._new_rows = torch.from_numpy(np.concatenate(rows))

    def write(self, kinds: Seq[torch.Tensor], layer: int) -> None:
        """``kinds``: keys, then values, each ``[num_tokens, num_kv_heads, size]``. Only keys for latents."""
        rows = torch.cat([one.reshape(-1, self._unit) for one in kinds])
        # NaN of a broken sequence must not enter the pool: its blocks may be cached all the same.
        rows = rows.nan_to_num_(0.0, 0.0, 0.0)
        self._flat_pool.index_copy_(0, self._new_rows + layer * self._rows_per_layer, rows)


class CpuPagedStep:
    """Implements PagedStep for one batch."""

    def __init__(
        self,
        batch: Batch,
        shape: ModelShape,
        groups: LayerGroups,
        pool: Seq[GroupKv],
        scratch: GatherScratch,
        states: StateStep | None = None,
        entries: EntryStep | None = None,
    ) -> None:
        self._groups = groups
        self._latent_rank = shape.latent_rank
        self._batch, self._pool = batch, pool
        self._picked: PickedLatents | None = None
        is_plain = not (shape.has_softcaps or shape.has_sinks)
        self._plans = [
            AttentionPlan(
                *(batch, kv, shape.num_q_heads, groups.windows[group], scratch),
                group=group,
                has_plain_scores=is_plain,
                latent_rank=shape.latent_rank,
                sees_ahead=shape.sees_ahead(groups.windows[group]),
            )
            for group, kv in enumerate(pool)
        ]
        self.positions = torch.from_numpy(batch.positions)
        self.states, self.entries = states, entries
        self._writers = [KvWriter(batch.slot_mapping[group], kv) for group, kv in enumerate(pool)]

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """See PagedStep."""
        group, place = self._groups.places[layer]
        self._writers[group].write((key, value), place)

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """See PagedStep."""
        group, place = self._groups.places[layer]
        out = query.new_empty(*query.shape[:2], self._groups.sizes[group].value_size)
        self._plans[group].run(query, place, out, scores)
        return out

    def latent_write(self, latents: torch.Tensor, layer: int) -> None:
        """See PagedStep."""
        group, place = self._groups.places[layer]
        self._writers[group].write((latents[:, None],), place)

    def latent_attention(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """See PagedStep."""
        assert self._latent_rank is not None, f"layer {layer} keeps no latents"
        out = query.new_empty(*query.shape[:2], self._latent_rank)
        group, place = self._groups.places[layer]
        if self._picked is not None:
            self._picked.attend(query, place, scale, out)
            return out
        self._plans[group].run(query, place, out, Scores(scale=scale))
        return out

    @property
    def longest(self) -> int:
        """See LatentStep."""
        return int(self._batch.seq_lens.max())

    def pick(self, index: IndexQueries, topk: int, layer: int) -> None:
        """See LatentStep."""
        group, place = self._groups.places[layer]
        self._picked = PickedLatents(self._batch, self._pool[group], group, index, topk, place)


class CpuStep(CpuPagedStep):
    """Implements StepContext and LatentStep for one batch."""

    def __init__(
        self,
        batch: Batch,
        shape: ModelShape,
        groups: LayerGroups,
        pool: Seq[GroupKv],
        scratch: GatherScratch,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """``tables``: None for a model with latents, which rotates by itself."""
        super().__init__(batch, shape, groups, pool, scratch)
        # [num_tokens, 1, rotary_size] each
        self._angles = [] if tables is None else [table[self.positions][:, None, :] for table in tables]

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        heads = torch.cat((query, key), dim=1)
        # Rounded where the reference implementation rounds: after each product and after the sum.
        cos, sin = self._angles
        rotary = heads[..., : cos.shape[-1]]
        swapped = rotary.roll(rotary.shape[-1] // 2, -1)
        rotary.mul_(cos).add_(swapped.mul_(sin))
        query, key = heads.split_with_sizes((query.shape[1], key.shape[1]), dim=1)
        self.kv_write(key, value, layer)
        return query


class CpuPagedOps:
    """Implements PagedOps, for models that rotate and normalise by themselves."""

    def __init__(self, shape: ModelShape, pool: torch.Tensor) -> None:
        self._shape = shape
        self._groups = LayerGroups.of_shape(shape, pool.shape[4])
        self._pool = view_groups(pool, self._groups)
        self._states = StatePool(shape, pool, self.upload) if shape.states else None
        self._entries = EntryPool(shape, pool, self.upload) if shape.entries else None
        self._scratch = GatherScratch(pool.dtype)
        self._packs = has_packed_linear(pool.dtype)

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        """See PagedOps. 8-bit weights need a CPU for which :func:`has_packed_linear` is true in bf16."""
        if isinstance(weight, StoredWeight):
            weight = weight.dequantised()
        if isinstance(weight, RoundedWeight):
            return Int8Linear(weight, bias, lambda integers: PackedLinear(integers, None))
        return PackedLinear(weight, bias) if self._packs else PlainLinear(weight, bias)

    def make_experts(self, weights: ExpertWeights, activation: Activation) -> Experts:
        """See PagedOps."""
        return CpuExperts(weights, activation, partial(SplitLinear, self.make_linear))

    def make_low_rank(self, dtype: torch.dtype) -> LowRankProducts:
        """See PagedOps."""
        return TorchLowRank()

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See PagedOps."""
        wide = hidden.to(torch.float32, copy=True)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(wide.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(scale).to(hidden.dtype).mul_(weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See PagedOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """See Ops. The arrays are already in the device's memory."""
        return [torch.from_numpy(array) for array in arrays]

    def begin_step(self, batch: Batch) -> CpuPagedStep:
        """See PagedOps."""
        states = None if self._states is None else self._states.begin_step(batch)
        entries = None if self._entries is None else self._entries.begin_step(batch)
        return CpuPagedStep(batch, self._shape, self._groups, self._pool, self._scratch, states, entries)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See SamplerOps. Computes in fp32, because torch has no fast argmax for smaller types."""
        return logits.float().argmax(dim=-1)

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        """See SamplerOps."""
        penalize(logits, penalties, last_tokens)

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        """See SamplerOps."""
        apply_bitmask(logits, rows, bitmask)

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See SamplerOps."""
        return draw_tokens(logits, rows)


class CpuOps(CpuPagedOps):
    """Implements Ops. Cosines are kept in the model's dtype, as in the reference implementations."""

    def __init__(self, config: ModelConfig, pool: torch.Tensor, max_model_len: int) -> None:
        super().__init__(config, pool)
        self._config = config
        self._tables = None if config.latent else cos_sin_rows(config, max_model_len, pool.dtype)

    def begin_step(self, batch: Batch) -> CpuStep:
        """See Ops."""
        return CpuStep(batch, self._config, self._groups, self._pool, self._scratch, self._tables)

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * gate * torch.sigmoid(gate * alpha)).to(gate_up.dtype)

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops."""
        return self.rms_norm(residual.add_(hidden), weight, eps)


def cos_sin_rows(config: ModelConfig, max_model_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines), both ``[max_model_len, rotary_size]``.

    The sine of the first half is negated, so that a rotation needs no negation.
    """
    cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
