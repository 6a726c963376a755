"""One step on a GPU: what it reads and writes of the pool, by our Triton kernels. Imported only where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.models.ops import PLAIN, Scores
from kvrelay.kernels.decode_attention import DecodeWorkspace, paged_decode_attention
from kvrelay.kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from kvrelay.kernels.prefill_attention import paged_prefill_attention
from kvrelay.kernels.prefill_tiles import TileLoads
from kvrelay.kernels.rotary import rotary_kv_write


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's numbers on the device. Rows of a single token come first."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_groups, num_tokens] int64
    slots: torch.Tensor  # [num_rows] int64, whose block tables they have
    seq_lens: torch.Tensor  # [num_rows] int32, 0 for padding
    query_start_loc: torch.Tensor  # [num_prefill_rows + 1] int32, of the rows behind num_decode_rows
    num_decode_rows: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class PagedKv:
    """All layers' keys and values, and how they are read."""

    pool: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], layers of the largest group
    groups: LayerGroups
    kv_scales: torch.Tensor | None  # [num_groups, num_layers, 2, num_kv_heads] fp32, of an fp8 pool
    loads: tuple[TileLoads, ...]  # of each group's prefill attention

    def scales(self, group: int) -> torch.Tensor | None:
        """Of a group's layers."""
        return None if self.kv_scales is None else self.kv_scales[group]


class CudaPagedStep:
    """Implements PagedStep for one batch: single-token rows by the decode kernel, the others by the prefill kernel."""

    def __init__(
        self,
        inputs: StepInputs,
        shape: ModelShape,
        kv: PagedKv,
        workspace: DecodeWorkspace,
        block_tables: torch.Tensor,
    ) -> None:
        """``block_tables`` ``[num_groups, num_slots, max_blocks]``: of all slots."""
        self._block_tables = block_tables.index_select(1, inputs.slots)
        self._shape = shape
        self._kv = kv
        self._workspace = workspace
        self._inputs = inputs
        self._scale = shape.head_dim**-0.5

    @property
    def positions(self) -> torch.Tensor:
        """See PagedStep."""
        return self._inputs.positions

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """See PagedStep. Not into an fp8 pool."""
        pool, block_size = self._kv.pool, self._kv.pool.shape[4]
        group, place = self._kv.groups.places[layer]
        blocks, offsets = self._inputs.slot_mapping[group] // block_size, self._inputs.slot_mapping[group] % block_size
        # A broken sequence's NaN would outlive it: attention reads a block's unwritten tail under a mask, and 0 * NaN is NaN.
        pool[blocks, place, 0, :, offsets] = key.nan_to_num(0.0, 0.0, 0.0)
        pool[blocks, place, 1, :, offsets] = value.nan_to_num(0.0, 0.0, 0.0)

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """See PagedStep."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        group, place = self._kv.groups.places[layer]
        inputs, window, block_tables = self._inputs, self._kv.groups.windows[group], self._block_tables[group]
        scale = self._scale if scores.scale is None else scores.scale
        sinks = None if scores.sinks is None else scores.sinks.detach()
        split = inputs.num_decode_rows
        if split:
            paged_decode_attention(
                query[:split],
                self._kv.pool,
                place,
                block_tables[:split],
                inputs.seq_lens[:split],
                scale=scale,
                sliding_window=window,
                workspace=self._workspace,
                out=out[:split],
                kv_scales=self._kv.scales(group),
                softcap=scores.softcap,
                sinks=sinks,
            )
        if split < inputs.seq_lens.shape[0]:
            paged_prefill_attention(
                query[split:],
                self._kv.pool,
                place,
                block_tables[split:],
                inputs.query_start_loc,
                inputs.seq_lens[split:],
                scale=scale,
                sliding_window=window,
                max_query_len=inputs.max_query_len,
                out=out[split:],
                kv_scales=self._kv.scales(group),
                softcap=scores.softcap,
                sinks=sinks,
                loads=self._kv.loads[group],
            )
        return out

    def latent_write(self, latents: torch.Tensor, layer: int) -> None:
        """See LatentStep."""
        pool, block_size = self._kv.pool, self._kv.pool.shape[4]
        group, place = self._kv.groups.places[layer]
        blocks, offsets = self._inputs.slot_mapping[group] // block_size, self._inputs.slot_mapping[group] % block_size
        pool[blocks, place, 0, 0, offsets] = latents.nan_to_num(0.0, 0.0, 0.0)  # as in kv_write

    def latent_attention(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """See LatentStep."""
        rank, inputs = self._shape.latent_rank, self._inputs
        assert rank is not None, f"layer {layer} keeps no latents"
        out = torch.empty((*query.shape[:2], rank), dtype=query.dtype, device=query.device)
        group, place = self._kv.groups.places[layer]
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
                workspace=self._workspace,
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
        kv: PagedKv,
        workspace: DecodeWorkspace,
        block_tables: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """``block_tables``: see CudaPagedStep. ``tables``: None of a model of latents, which rotates by itself."""
        super().__init__(inputs, shape, kv, workspace, block_tables)
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
