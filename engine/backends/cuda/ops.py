"""The operations on a GPU: our Triton kernels. Imported only where there is one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cuda.experts import CudaExperts
from kvrelay.engine.backends.cuda.linear import RoundedLinear, StoredLinear
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.config.rope import cos_sin_tables
from kvrelay.engine.models.ops import PLAIN, Activation, Experts, Linear, Scores
from kvrelay.engine.sampling.filters import filter_typical_rows
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import TableDelta
from kvrelay.engine.step.uploads import Joined, Uploader
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.kernels.activation import clamped_swiglu, silu_mul
from kvrelay.kernels.decode_attention import DecodeWorkspace, paged_decode_attention, splits_for_device
from kvrelay.kernels.kv_scales import require_compute_dtype, require_e4m3
from kvrelay.kernels.norm import add_rms_norm, rms_norm
from kvrelay.kernels.penalties import NewTokens, apply_penalties
from kvrelay.kernels.prefill_attention import paged_prefill_attention
from kvrelay.kernels.prefill_tiles import TileLoads, nvidia_capability, tile_loads
from kvrelay.kernels.rotary import rotary_kv_write
from kvrelay.kernels.sampling import sample

# Where the operations run in an interpreter: any number does.
_MULTIPROCESSORS_OF_A_CPU = 16


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's numbers on the device. Rows of a single token come first."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_rows] int64, whose block tables they have
    seq_lens: torch.Tensor  # [num_rows] int32, 0 for padding
    query_start_loc: torch.Tensor  # [num_prefill_rows + 1] int32, of the rows behind num_decode_rows
    num_decode_rows: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class PagedKv:
    """All layers' keys and values, and how they are read."""

    pool: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    kv_scales: torch.Tensor | None  # [num_layers, 2, num_kv_heads] fp32, of an fp8 pool
    loads: tuple[TileLoads, ...]  # of each layer's prefill attention


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
        """``block_tables``: of all slots."""
        self._block_tables = block_tables.index_select(0, inputs.slots)
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
        blocks, offsets = self._inputs.slot_mapping // block_size, self._inputs.slot_mapping % block_size
        # A broken sequence's NaN would outlive it: attention reads a block's unwritten tail under a mask, and 0 * NaN is NaN.
        pool[blocks, layer, 0, :, offsets] = key.nan_to_num(0.0, 0.0, 0.0)
        pool[blocks, layer, 1, :, offsets] = value.nan_to_num(0.0, 0.0, 0.0)

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """See PagedStep."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        inputs, window = self._inputs, self._shape.sliding_windows[layer]
        scale = self._scale if scores.scale is None else scores.scale
        sinks = None if scores.sinks is None else scores.sinks.detach()
        split = inputs.num_decode_rows
        if split:
            paged_decode_attention(
                query[:split],
                self._kv.pool,
                layer,
                self._block_tables[:split],
                inputs.seq_lens[:split],
                scale=scale,
                sliding_window=window,
                workspace=self._workspace,
                out=out[:split],
                kv_scales=self._kv.kv_scales,
                softcap=scores.softcap,
                sinks=sinks,
            )
        if split < inputs.seq_lens.shape[0]:
            paged_prefill_attention(
                query[split:],
                self._kv.pool,
                layer,
                self._block_tables[split:],
                inputs.query_start_loc,
                inputs.seq_lens[split:],
                scale=scale,
                sliding_window=window,
                max_query_len=inputs.max_query_len,
                out=out[split:],
                kv_scales=self._kv.kv_scales,
                softcap=scores.softcap,
                sinks=sinks,
                loads=self._kv.loads[layer],
            )
        return out


class CudaStep(CudaPagedStep):
    """Implements StepContext for one batch."""

    def __init__(
        self,
        inputs: StepInputs,
        shape: ModelShape,
        kv: PagedKv,
        workspace: DecodeWorkspace,
        block_tables: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """``block_tables``: of all slots."""
        super().__init__(inputs, shape, kv, workspace, block_tables)
        self._cos, self._sin = tables

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        inputs = self._inputs
        rotary_kv_write(
            query,
            key,
            value,
            self._cos,
            self._sin,
            inputs.positions,
            self._kv.pool,
            layer,
            inputs.slot_mapping,
            self._kv.kv_scales,
        )
        return query


def _changes(deltas: Seq[TableDelta], max_blocks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Where ``deltas`` change tables of ``max_blocks``, laid out one behind the other, and to which blocks."""
    places, block_ids = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for delta in deltas:
        first = delta.slot * max_blocks + delta.start
        places.append(np.arange(first, first + len(delta.block_ids)))
        block_ids.append(np.array(delta.block_ids, dtype=np.int32))
    return np.concatenate(places), np.concatenate(block_ids)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class CudaPagedOps:
    """Implements PagedOps: for models that rotate and normalise by themselves."""

    def __init__(
        self,
        shape: ModelShape,
        pool: torch.Tensor,
        max_model_len: int,
        max_num_seqs: int,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """An fp8 (e4m3) pool needs ``kv_scales`` ``[num_layers, 2, num_kv_heads]`` fp32, on the pool's device.

        Raises:
            ValueError: an fp8 pool on a device without that type; scales that are missing, not wanted or of another shape.
        """
        if kv_scales is not None:
            require_e4m3(pool.device)
        require_compute_dtype(pool, kv_scales)
        self._shape = shape
        capability = nvidia_capability(pool.device)
        loads = tuple(tile_loads(capability, pool, window) for window in shape.sliding_windows)
        self._kv = PagedKv(pool, kv_scales, loads)
        self._uploader = Uploader(pool.device)
        # Of all slots, and of one more: before the first step so many rows and a prompt are tried.
        max_blocks = -(-max_model_len // pool.shape[4])
        self.block_tables = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=pool.device)
        self._num_multiprocessors = _num_multiprocessors(pool.device)
        self._compiled: set[tuple[object, ...]] = set()  # kinds of products with weights of 4 and 8 bits
        max_splits = splits_for_device(self._num_multiprocessors, shape.num_kv_heads)
        self._workspace = DecodeWorkspace.allocate(
            max_num_seqs, shape.num_q_heads, shape.head_dim, max_splits, pool.device
        )

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        """See Ops. cuBLAS reads ``[out, in]`` as it is; others need bf16 or fp16 activations."""
        if isinstance(weight, torch.Tensor):
            return lambda hidden: F.linear(hidden, weight, bias)
        linear = (
            RoundedLinear(weight, bias, self._num_multiprocessors)
            if isinstance(weight, RoundedWeight)
            else StoredLinear(weight, bias, self._num_multiprocessors)
        )
        kind = (weight.values.dtype, weight.scale.dtype, weight.scale.numel(), *weight.shape, bias is None)
        if weight.values.is_cuda and kind not in self._compiled:
            self._compiled.add(kind)
            linear.compile()
        return linear

    def make_experts(self, weights: ExpertWeights, activation: Activation) -> Experts:
        """See PagedOps."""
        return CudaExperts(weights, activation)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See PagedOps."""
        return rms_norm(hidden, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See PagedOps."""
        return silu_mul(gate_up)

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """See Ops."""
        return self._uploader.upload(arrays)

    def begin_step(self, batch: Batch) -> CudaPagedStep:
        """See PagedOps."""
        return self.step_of(self.inputs_of(batch))

    def inputs_of(self, batch: Batch) -> StepInputs:
        """A batch's numbers, uploaded; ``block_tables`` are changed by what is new in them."""
        num_decode = batch.num_decode_rows
        places, block_ids = _changes(batch.table_deltas, self.block_tables.shape[1])
        positions, slot_mapping, slots, seq_lens, query_start_loc, places_there, block_ids_there = (
            self._uploader.upload(
                (
                    batch.positions,
                    batch.slot_mapping,
                    batch.slots,
                    batch.seq_lens.astype(np.int32),
                    (batch.query_start_loc[num_decode:] - num_decode).astype(np.int32),
                    places,
                    block_ids,
                )
            )
        )
        if len(places):
            self.block_tables.view(-1)[places_there] = block_ids_there
        return StepInputs(positions, slot_mapping, slots, seq_lens, query_start_loc, num_decode, batch.max_query_len)

    def step_of(self, inputs: StepInputs) -> CudaPagedStep:
        """A step over numbers that are on the device."""
        return CudaPagedStep(inputs, self._shape, self._kv, self._workspace, self.block_tables)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See SamplerOps."""
        return logits.argmax(dim=-1)

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        """See SamplerOps."""
        entries, repetition, presence, frequency, num_under_way, row_starts = self._uploader.upload(
            (
                Joined([np.empty((0, 2), np.int32), *penalties.entries]),
                penalties.repetition,
                penalties.presence,
                penalties.frequency,
                penalties.num_under_way,
                penalties.row_starts,
            )
        )
        new = None if last_tokens is None else NewTokens(last_tokens, num_under_way, row_starts)
        # With the number of them given, nobody waits for the device to add it up.
        num_entries = penalties.num_entries
        rows = torch.repeat_interleave(row_starts.diff(), output_size=num_entries).long()
        tokens = torch.empty(num_entries, dtype=torch.int64, device=entries.device).copy_(entries[:, 0])
        counts = torch.empty(num_entries, dtype=torch.int32, device=entries.device).copy_(entries[:, 1])
        apply_penalties(logits, rows, tokens, counts, repetition, presence, frequency, new)

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See SamplerOps. The kernel's sums and draws are fp32: near a boundary it may take the neighbour of what the CPU takes.

        It knows no typical sampling: rows that ask for it come to it filtered.
        """
        rows = filter_typical_rows(logits, rows, self._uploader.upload)
        # A draw next to 1 must not become 1.
        draws = np.minimum(rows.uniforms.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
        of_rows = self._uploader.upload((rows.temperature, rows.top_k, rows.top_p, rows.min_p, draws))
        return sample(logits, *of_rows)


class CudaOps(CudaPagedOps):
    """Implements Ops."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        max_model_len: int,
        max_num_seqs: int,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """``kv_scales``: see CudaPagedOps, and what it raises."""
        super().__init__(config, pool, max_model_len, max_num_seqs, kv_scales)
        self._config = config
        cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
        self._tables = (cos.to(pool.device), sin.to(pool.device))

    def begin_step(self, batch: Batch) -> CudaStep:
        """See Ops."""
        return self.step_of(self.inputs_of(batch))

    def step_of(self, inputs: StepInputs) -> CudaStep:
        """A step over numbers that are on the device."""
        return CudaStep(inputs, self._config, self._kv, self._workspace, self.block_tables, self._tables)

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """See Ops."""
        return clamped_swiglu(gate_up, alpha, limit)

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops."""
        return add_rms_norm(hidden, residual, weight, eps)
