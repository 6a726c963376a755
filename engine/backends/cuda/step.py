"""One step on a GPU: our Triton kernels read and write its K/V in the pool. Imported only where there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.common.kv_geometry import Chunk
from kvrelay.engine.backends.cuda.inputs import StepInputs
from kvrelay.engine.backends.cuda.picked import PickedRows
from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.entries import EntryStep
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.kv.states import StateStep
from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.models.ops import PLAIN, IndexQueries, Scores
from kvrelay.kernels.attention.decode import paged_decode_attention
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.latent import latent_decode_attention, latent_prefill_attention
from kvrelay.kernels.attention.prefill import paged_prefill_attention
from kvrelay.kernels.attention.prefill_tiles import TileLoads
from kvrelay.kernels.attention.rotary import rotary_kv_write
from kvrelay.kernels.checks import PagedKv


@dataclass(frozen=True, slots=True)
class StepKv:
    """The K/V of all layers, and how kernels read them."""

    pool: torch.Tensor  # KvPool.tensor
    # Per group, in the form that attention reads; layers of the largest group.
    pools: tuple[torch.Tensor | PagedKv, ...]
    views: tuple[GroupKv, ...]  # of each group
    groups: LayerGroups
    kv_scales: torch.Tensor | None  # [num_groups, num_layers, 2, num_kv_heads] fp32, of an fp8 pool
    loads: tuple[TileLoads, ...]  # per group, for prefill attention
    workspaces: tuple[DecodeWorkspace, ...]  # per group; groups with values of one size share one

    def scales(self, group: int) -> torch.Tensor | None:
        """The scales of a group's layers; None without an fp8 pool."""
        return None if self.kv_scales is None else self.kv_scales[group]


class CudaPagedStep:
    """Implements PagedStep for one batch. The decode kernel computes single-token rows, and the prefill kernel the others."""

    def __init__(
        self,
        inputs: StepInputs,
        shape: ModelShape,
        kv: StepKv,
        block_tables: torch.Tensor,
    ) -> None:
        """``block_tables`` ``[num_groups, num_slots, max_blocks]``: of all slots."""
        self.states: StateStep | None = None
        self.entries: EntryStep | None = None
        self._block_tables = block_tables.index_select(1, inputs.slots)
        self._shape = shape
        self._kv = kv
        self._inputs = inputs
        self._picked: PickedRows | None = None

    @property
    def positions(self) -> torch.Tensor:
        """See PagedStep."""
        return self._inputs.positions

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """See PagedStep. The pool must not be fp8."""
        group, place = self._kv.groups.places[layer]
        views, slots = self._kv.views[group], self._inputs.slot_mapping[group]
        blocks, offsets = slots // views.block_size, slots % views.block_size
        # NaN of a broken sequence must not enter the pool: its blocks may be cached all the same.
        views.keys[blocks, place, :, offsets] = key.nan_to_num(0.0, 0.0, 0.0)
        views.values[blocks, place, :, offsets] = value.nan_to_num(0.0, 0.0, 0.0)

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """See PagedStep."""
        group, place = self._kv.groups.places[layer]
        sizes = self._kv.groups.sizes[group]
        out = torch.empty((*query.shape[:2], sizes.value_size), dtype=query.dtype, device=query.device)
        inputs, window, block_tables = self._inputs, self._kv.groups.windows[group], self._block_tables[group]
        seen = {"chunk_size": window.size} if isinstance(window, Chunk) else {"sliding_window": window}
        scale = sizes.key_size**-0.5 if scores.scale is None else scores.scale
        sinks = None if scores.sinks is None else scores.sinks.detach()
        split = inputs.num_decode_rows
        if split:
            paged_decode_attention(
                query[:split],
                self._kv.pools[group],
                place,
                block_tables[:split],
                inputs.seq_lens[:split],
                scale=scale,
                **seen,
                workspace=self._kv.workspaces[group],
                out=out[:split],
                kv_scales=self._kv.scales(group),
                softcap=scores.softcap,
                sinks=sinks,
            )
        if split < inputs.seq_lens.shape[0]:
            paged_prefill_attention(
                query[split:],
                self._kv.pools[group],
                place,
                block_tables[split:],
                inputs.query_start_loc,
                inputs.seq_lens[split:],
                scale=scale,
                **seen,
                max_query_len=inputs.max_query_len,
                out=out[split:],
                kv_scales=self._kv.scales(group),
                softcap=scores.softcap,
                sinks=sinks,
                last_seen=inputs.last_seen if self._shape.sees_ahead(window) else None,
                loads=self._kv.loads[group],
            )
        return out

    @property
    def longest(self) -> int:
        """See LatentStep."""
        return self._inputs.longest

    def pick(self, index: IndexQueries, topk: int, layer: int) -> None:
        """See LatentStep."""
        group, place = self._kv.groups.places[layer]
        self._picked = PickedRows(self._inputs, self._block_tables[group], index, topk, self._kv.pool, place)

    def latent_write(self, latents: torch.Tensor, layer: int) -> None:
        """See LatentStep."""
        group, place = self._kv.groups.places[layer]
        views, slots = self._kv.views[group], self._inputs.slot_mapping[group]
        blocks, offsets = slots // views.block_size, slots % views.block_size
        views.keys[blocks, place, 0, offsets] = latents.nan_to_num(0.0, 0.0, 0.0)  # as in kv_write

    def latent_attention(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """See LatentStep."""
        rank, inputs = self._shape.latent_rank, self._inputs
        assert rank is not None, f"layer {layer} keeps no latents"
        out = torch.empty((*query.shape[:2], rank), dtype=query.dtype, device=query.device)
        group, place = self._kv.groups.places[layer]
        if self._picked is not None:
            self._picked.attend(query, self._kv.pool, place, scale, self._kv.workspaces[group], out)
            return out
        block_tables, split = self._block_tables[group], inputs.num_decode_rows
        if split:
            latent_decode_attention(
                query[:split],
                self._kv.pool,
                place,
                block_tables[:split],
                inputs.seq_lens[:split],
                rank=rank,
                scale=scale,
                workspace=self._kv.workspaces[group],
                out=out[:split],
            )
        if split < inputs.seq_lens.shape[0]:
            latent_prefill_attention(
                query[split:],
                self._kv.pool,
                place,
                block_tables[split:],
                inputs.query_start_loc,
                inputs.seq_lens[split:],
                rank=rank,
                scale=scale,
                max_query_len=inputs.max_query_len,
                out=out[split:],
            )
        return out


class CudaStep(CudaPagedStep):
    """Implements StepContext and LatentStep for one batch."""

    def __init__(
        self,
        inputs: StepInputs,
        shape: ModelShape,
        kv: StepKv,
        block_tables: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """``block_tables``: see CudaPagedStep. ``tables``: None for a model with latents, which rotates by itself."""
        super().__init__(inputs, shape, kv, block_tables)
        self._tables = tables

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        assert self._tables is not None, "a model of latents rotates by itself"
        inputs, (group, place) = self._inputs, self._kv.groups.places[layer]
        rotary_kv_write(
            query,
            key,
            value,
            *self._tables,
            inputs.positions,
            self._kv.pool,
            place,
            inputs.slot_mapping[group],
            self._kv.scales(group),
        )
        return query
