"""The operations on a GPU: our Triton kernels. Imported only where there is one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cuda.experts import CudaExperts
from kvrelay.engine.backends.cuda.inputs import GraphInputs, StepInputs
from kvrelay.engine.backends.cuda.linear import Fp8Linear, FullLinear, RoundedLinear, StoredLinear, is_for_vectors
from kvrelay.engine.backends.cuda.low_rank import CudaLowRank
from kvrelay.engine.backends.cuda.recurrent import CudaRecurrentKernels
from kvrelay.engine.backends.cuda.step import CudaPagedStep, CudaStep, StepKv
from kvrelay.engine.config.model import KvSizes, ModelConfig, ModelShape
from kvrelay.engine.config.rope import cos_sin_tables
from kvrelay.engine.kv.entries import EntryPool
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.kv.states import StatePool
from kvrelay.engine.kv.views import GroupKv, view_groups
from kvrelay.engine.models.ops import Activation, Experts, Linear
from kvrelay.engine.sampling.filters import filter_typical_rows
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import TableDelta
from kvrelay.engine.step.uploads import Joined, Uploader
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace, splits_for_device
from kvrelay.kernels.attention.kv_scales import require_compute_dtype, require_e4m3
from kvrelay.kernels.attention.latent import latent_programs
from kvrelay.kernels.attention.prefill_tiles import nvidia_capability, tile_loads
from kvrelay.kernels.checks import PagedKv
from kvrelay.kernels.rows import activation
from kvrelay.kernels.rows.norm import add_rms_norm, rms_norm
from kvrelay.kernels.sampling.bitmask import apply_bitmask
from kvrelay.kernels.sampling.penalties import NewTokens, apply_penalties
from kvrelay.kernels.sampling.sample import sample

# For Triton's interpreter on a CPU; any number works.
_MULTIPROCESSORS_OF_A_CPU = 16


def _changes(
    deltas: Seq[TableDelta], num_slots: int, max_blocks: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Where ``deltas`` change tables of ``max_blocks`` (consecutive by group and slot), and the new blocks there."""
    places, block_ids = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for delta in deltas:
        first = (delta.group * num_slots + delta.slot) * max_blocks + delta.start
        places.append(np.arange(first, first + len(delta.block_ids)))
        block_ids.append(np.array(delta.block_ids, dtype=np.int32))
    return np.concatenate(places), np.concatenate(block_ids)


def _by_group(kv_scales: torch.Tensor, groups: LayerGroups) -> torch.Tensor:
    """A model's scales as ``[num_groups, num_layers, 2, num_kv_heads]``, in the pool's order of layers; 1 where there is none."""
    if len(kv_scales) != len(groups.places):
        raise ValueError(f"kv_scales of {len(kv_scales)} layers; the model has {len(groups.places)}")
    most = max(map(len, groups.layers))
    by_group = kv_scales.new_ones(len(groups.layers), most, *kv_scales.shape[1:])
    for group, layers in enumerate(groups.layers):
        by_group[group, : len(layers)] = kv_scales[list(layers)]
    return by_group


def _as_read(pool: torch.Tensor, kv: GroupKv) -> torch.Tensor | PagedKv:
    """The pool as attention over one group reads it: the whole tensor if all keys and values have one size."""
    is_of_one_size = pool.shape[1:] == (kv.keys.shape[1], pool.shape[2], *kv.keys.shape[2:]) and pool.shape[2] <= 2
    return pool if is_of_one_size else PagedKv(kv.keys, kv.values)


def _workspaces(
    shape: ModelShape, groups: LayerGroups, max_num_seqs: int, num_multiprocessors: int, device: torch.device
) -> tuple[DecodeWorkspace, ...]:
    """The decode kernel's workspace for each group."""
    made: dict[KvSizes, DecodeWorkspace] = {}
    of_attention = groups.sizes[: groups.num_attention]
    for sizes in of_attention:
        if sizes not in made:
            num_programs, value_size = sizes.num_kv_heads, sizes.value_size
            if shape.latent_rank is not None:
                num_programs, value_size = latent_programs(shape.num_q_heads), shape.latent_rank
            max_splits = splits_for_device(num_multiprocessors, num_programs)
            made[sizes] = DecodeWorkspace.allocate(max_num_seqs, shape.num_q_heads, value_size, max_splits, device)
    return tuple(made[sizes] for sizes in of_attention)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class CudaPagedOps:
    """Implements PagedOps, for models that rotate and normalise by themselves."""

    # The kernel's own function, which CudaExperts recognises.
    silu_mul = staticmethod(activation.silu_mul)

    def __init__(
        self,
        shape: ModelShape,
        pool: torch.Tensor,
        max_model_len: int,
        max_num_seqs: int,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """``kv_scales``: for an fp8 (e4m3) pool the model's scales ``[num_layers, 2, num_kv_heads]`` fp32 on the pool's device;
        else None.

        Raises:
            ValueError: an fp8 pool on a device without that type; scales that are missing, not wanted or of another shape.
        """
        if kv_scales is not None:
            require_e4m3(pool.device)
        self._shape = shape
        groups, capability = LayerGroups.of_shape(shape, pool.shape[4]), nvidia_capability(pool.device)
        by_group = None if kv_scales is None else _by_group(kv_scales, groups)
        require_compute_dtype(pool, None if by_group is None else by_group[0])
        views = view_groups(pool, groups)
        pools = tuple(_as_read(pool, one) for one in views)
        loads = tuple(
            tile_loads(capability, one, has_window=window is not None)
            for one, window in zip(pools, groups.windows, strict=False)
        )
        self._uploader = Uploader(pool.device)
        # Tables for all slots and one more: the warm-up before the first step needs as many rows and a prompt.
        max_blocks = -(-max_model_len // pool.shape[4])
        self.block_tables = torch.zeros(
            len(groups.windows), max_num_seqs + 1, max_blocks, dtype=torch.int32, device=pool.device
        )
        self._num_multiprocessors = _num_multiprocessors(pool.device)
        self._compiled: set[tuple[object, ...]] = set()  # kinds of products by our kernels that are compiled
        workspaces = _workspaces(shape, groups, max_num_seqs, self._num_multiprocessors, pool.device)
        self._kv = StepKv(pool, pools, views, groups, by_group, loads, workspaces)
        self._states = StatePool(shape, pool, self.upload, CudaRecurrentKernels()) if shape.states else None
        self._entries = EntryPool(shape, pool, self.upload) if shape.entries else None

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        """See Ops. cuBLAS reads ``[out, in]`` as it is. Other weights need bf16 or fp16 activations."""
        if isinstance(weight, torch.Tensor):
            if nvidia_capability(weight.device) is None or not is_for_vectors(weight):
                return lambda hidden: F.linear(hidden, weight, bias)
            full, full_kind = FullLinear(weight, bias), (weight.dtype, *weight.shape, bias is None)
            if full_kind not in self._compiled:
                self._compiled.add(full_kind)
                full.compile()
            return full
        linear: RoundedLinear | StoredLinear | Fp8Linear
        inputs = groups = None
        if isinstance(weight, RoundedWeight):
            linear = RoundedLinear(weight, bias, self._num_multiprocessors)
        elif (inputs := weight.inputs) is not None:
            linear = Fp8Linear(weight, bias, self._num_multiprocessors)
        else:
            linear = StoredLinear(weight, bias, self._num_multiprocessors)
            groups = (weight.group_size, weight.zero is None)
        rounds = None if inputs is None else (inputs.group_size, inputs.scale is None)
        dtypes = weight.values.dtype, weight.scale.dtype
        kind = (*dtypes, weight.scale.numel(), *weight.shape, bias is None, rounds, groups)
        if weight.values.is_cuda and kind not in self._compiled:
            self._compiled.add(kind)
            linear.compile()
        return linear

    def make_experts(self, weights: ExpertWeights, activation: Activation) -> Experts:
        """See PagedOps."""
        experts = CudaExperts(weights, activation)
        experts.compile(self.block_tables.device)
        return experts

    def make_low_rank(self, dtype: torch.dtype) -> CudaLowRank:
        """See PagedOps."""
        return CudaLowRank(self._uploader.upload, dtype, self.block_tables.device)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See PagedOps."""
        return rms_norm(hidden, weight, eps)

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """See Ops."""
        return self._uploader.upload(arrays)

    def begin_step(self, batch: Batch) -> CudaPagedStep:
        """See PagedOps."""
        step = self.step_of(self.inputs_of(batch))
        if self._states is not None:
            step.states = self._states.begin_step(batch)
        if self._entries is not None:
            step.entries = self._entries.begin_step(batch)
        return step

    def inputs_of(self, batch: Batch) -> StepInputs:
        """Upload a batch's numbers. Applies its changes to ``block_tables``."""
        self.update_tables(batch.table_deltas)
        num_decode = batch.num_decode_rows
        query_lens = np.diff(batch.query_start_loc)[num_decode:]
        # An array of its own begins at a multiple of 16 bytes, so that it needs no other kernel behind other rows.
        last_seen = () if batch.last_seen is None else (batch.last_seen[num_decode:].astype(np.int32),)
        positions, slot_mapping, slots, seq_lens, query_start_loc, *ahead = self._uploader.upload(
            (
                batch.positions,
                batch.slot_mapping,
                batch.slots,
                batch.seq_lens.astype(np.int32),
                (batch.query_start_loc[num_decode:] - num_decode).astype(np.int32),
                *last_seen,
            )
        )
        return StepInputs(
            *(positions, slot_mapping, slots, seq_lens, query_start_loc),
            num_decode,
            batch.max_query_len,
            last_seen=ahead[0] if ahead else None,
            longest=int(batch.seq_lens.max()),
            prompts=tuple(zip(query_lens.tolist(), batch.seq_lens[num_decode:].tolist(), strict=True)),
        )

    def update_tables(self, deltas: Seq[TableDelta]) -> None:
        """Apply ``deltas`` to ``block_tables``."""
        places, block_ids = _changes(deltas, *self.block_tables.shape[1:])
        if len(places):
            places_there, block_ids_there = self._uploader.upload((places, block_ids))
            self.block_tables.view(-1)[places_there] = block_ids_there

    def graph_inputs(self, num_rows: int, padding_slot: int, longest: int) -> GraphInputs:
        """See GraphInputs."""
        device = self.block_tables.device
        return GraphInputs(self._uploader, len(self.block_tables), num_rows, padding_slot, device, longest)

    def trial_steps(self, batch: Batch) -> list[Any]:
        """Steps of ``batch`` that together launch all kernels that such a batch may need, whatever its lengths."""
        return [self.begin_step(batch)]

    def step_of(self, inputs: StepInputs) -> CudaPagedStep:
        """A step over numbers that are already on the device."""
        return CudaPagedStep(inputs, self._shape, self._kv, self.block_tables)

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
        # ``output_size`` is given so that the host need not wait for the device's sum.
        num_entries = penalties.num_entries
        rows = torch.repeat_interleave(row_starts.diff(), output_size=num_entries).long()
        tokens = torch.empty(num_entries, dtype=torch.int64, device=entries.device).copy_(entries[:, 0])
        counts = torch.empty(num_entries, dtype=torch.int32, device=entries.device).copy_(entries[:, 1])
        apply_penalties(logits, rows, tokens, counts, repetition, presence, frequency, new)

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        """See SamplerOps."""
        apply_bitmask(logits, *self._uploader.upload((np.array(rows, dtype=np.int64), bitmask)))

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See SamplerOps. The kernel's sums and draws are fp32, so near a boundary it may take the neighbour of the CPU's token.

        It has no typical sampling: rows that ask for it must be filtered before.
        """
        rows = filter_typical_rows(logits, rows, self._uploader.upload)
        # Rounding to fp32 must not turn a draw just below 1 into 1.
        draws = np.minimum(rows.uniforms.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
        of_rows = self._uploader.upload((rows.temperature, rows.top_k, rows.top_p, rows.min_p, draws))
        return sample(logits, *of_rows)


class CudaOps(CudaPagedOps):
    """Implements Ops."""

    clamped_swiglu = staticmethod(activation.clamped_swiglu)

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        max_model_len: int,
        max_num_seqs: int,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """``kv_scales``, and what is raised: see CudaPagedOps."""
        super().__init__(config, pool, max_model_len, max_num_seqs, kv_scales)
        self._config = config
        self._max_model_len = max_model_len
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.latent is None:
            cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
            self._tables = (cos.to(pool.device), sin.to(pool.device))

    def begin_step(self, batch: Batch) -> CudaStep:
        """See Ops."""
        return self.step_of(self.inputs_of(batch))

    def step_of(self, inputs: StepInputs) -> CudaStep:
        """A step over numbers that are already on the device."""
        return CudaStep(inputs, self._config, self._kv, self.block_tables, self._tables)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of sequences up to which steps launch the same kernels; ascending. The last one is the longest possible."""
        latent = self._config.latent
        topk = None if latent is None or latent.indexer is None else latent.indexer.topk
        return (self._max_model_len,) if topk is None or topk >= self._max_model_len else (topk, self._max_model_len)

    def trial_steps(self, batch: Batch) -> list[CudaStep]:
        """See CudaPagedOps."""
        inputs = self.inputs_of(batch)
        return [self.step_of(replace(inputs, longest=longest)) for longest in self.lengths]

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops."""
        return add_rms_norm(hidden, residual, weight, eps)
