"""The operations on the CPU in bf16: our C++ kernels, and oneDNN for matrix products where it is faster.

On processors of one kind, a token's result does not depend on what else is in the step, nor on how its sequence was cut into steps.
So an answer that is computed anew continues with the same tokens. This does not hold for 8-bit weights, nor for oneDNN's products.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.backends.cpu.experts import CpuExperts, GroupedLinear, NativeGroupedLinear, SplitLinear
from kvrelay.engine.backends.cpu.linear import Int8Linear, NativeLinear, has_packed_linear
from kvrelay.engine.backends.cpu.low_rank import NativeLowRank
from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.backends.cpu.native.library import Step
from kvrelay.engine.backends.cpu.ops import CpuPagedOps, KvWriter, cos_sin_rows
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.kv.entries import EntryPool, EntryStep
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.kv.states import StatePool, StateStep
from kvrelay.engine.kv.views import GroupKv, view_groups
from kvrelay.engine.models.low_rank import LowRankProducts
from kvrelay.engine.models.ops import PLAIN, Activation, Experts, Linear, Scores
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Ints
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight, Weight
from kvrelay.engine.weights.stored import StoredWeight


class NativeCpuPagedStep:
    """Implements PagedStep for one batch of a model without softcaps."""

    def __init__(
        self,
        batch: Batch,
        shape: ModelShape,
        groups: LayerGroups,
        pool: Seq[GroupKv],
        kernels: CpuKernels,
        tables: tuple[torch.Tensor, torch.Tensor] | None = None,
        states: StateStep | None = None,
        entries: EntryStep | None = None,
    ) -> None:
        """``tables``: cosines and sines, for the kernels that rotate."""
        self.states, self.entries = states, entries
        self._kernels = kernels
        self._groups = groups
        self._batch = batch
        self._pool = pool
        self._writers: dict[int, KvWriter] = {}
        cos, sin = (0, 0) if tables is None else (table.data_ptr() for table in tables)
        rotary_size = 0 if tables is None else tables[0].shape[-1]
        self._kept: list[object] = [tables]  # kept alive because the kernels have their addresses
        positions, seq_lens, query_starts = map(self._address, (batch.positions, batch.seq_lens, batch.query_start_loc))
        # 0 is C++'s null.
        last_seen = 0 if batch.last_seen is None else self._address(batch.last_seen)
        self._steps = [
            Step(
                pool=kv.keys.data_ptr(), cos=cos, sin=sin, positions=positions, slots=self._address(batch.slot_mapping[group]),
                block_tables=self._address(batch.block_tables(group)), seq_lens=seq_lens, query_starts=query_starts,
                last_seen=last_seen if shape.sees_ahead(groups.windows[group]) else 0,
                num_tokens=len(batch.positions), num_rows=len(batch.seq_lens), max_blocks=batch.max_blocks,
                block_stride=kv.block_stride, q_heads=shape.num_q_heads, kv_heads=kv.sizes.num_kv_heads, block_size=kv.block_size,
                key_size=kv.sizes.key_size, value_size=kv.sizes.value_size, rotary_size=rotary_size,
            )
            for group, kv in enumerate(pool)
        ]  # fmt: skip

    def _address(self, array: Ints) -> int:
        kept = np.ascontiguousarray(array, dtype=np.int64)
        self._kept.append(kept)
        return kept.ctypes.data

    @property
    def positions(self) -> torch.Tensor:
        """See PagedStep."""
        return torch.from_numpy(self._batch.positions)

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """See PagedStep."""
        group, place = self._groups.places[layer]
        if group not in self._writers:
            self._writers[group] = KvWriter(self._batch.slot_mapping[group], self._pool[group])
        self._writers[group].write((key, value), place)

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """See PagedStep."""
        group, place = self._groups.places[layer]
        window = self._groups.windows[group]
        return self._kernels.attention(self._steps[group], place, query, window, scores.scale, scores.sinks)


class NativeCpuStep(NativeCpuPagedStep):
    """Implements StepContext for one batch."""

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        group, place = self._groups.places[layer]
        return self._kernels.rotary_kv_write(self._steps[group], place, query, key, value)


class NativeCpuPagedOps:
    """Implements PagedOps for a bf16 ``pool`` and a model without softcaps. Samples like :class:`CpuPagedOps`."""

    def __init__(self, shape: ModelShape, pool: torch.Tensor, kernels: CpuKernels) -> None:
        """:meth:`CpuKernels.fit` must accept the model."""
        self._plain = CpuPagedOps(shape, pool)
        self._shape = shape
        self._groups = LayerGroups.of_shape(shape, pool.shape[4])
        self._pool = view_groups(pool, self._groups)
        self._kernels = kernels
        self._states = StatePool(shape, pool, self.upload) if shape.states else None
        self._entries = EntryPool(shape, pool, self.upload) if shape.entries else None

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        """See PagedOps."""
        if isinstance(weight, StoredWeight) or not has_native_linear(self._kernels, weight):
            return self._plain.make_linear(weight, bias)
        if isinstance(weight, RoundedWeight):
            return Int8Linear(weight, bias, lambda integers: NativeLinear(self._kernels, integers, None))
        return NativeLinear(self._kernels, weight, bias)

    def make_experts(self, weights: ExpertWeights, activation: Activation) -> Experts:
        """See PagedOps."""

        def grouped(weight: AnyWeight, bias: torch.Tensor | None, num_experts: int) -> GroupedLinear:
            if isinstance(weight, RoundedWeight | StoredWeight) or not has_native_linear(self._kernels, weight):
                return SplitLinear(self.make_linear, weight, bias, num_experts)
            return NativeGroupedLinear(self._kernels, weight, bias, num_experts)

        return CpuExperts(weights, activation, grouped)

    def make_low_rank(self, dtype: torch.dtype) -> LowRankProducts:
        """See PagedOps."""
        return NativeLowRank(self._kernels)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See PagedOps."""
        if not CpuKernels.fits_width(hidden.shape[-1]):
            return self._plain.rms_norm(hidden, weight, eps)
        return self._kernels.rms_norm(None, hidden.contiguous(), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See PagedOps."""
        has_code = CpuKernels.fits_width(gate_up.shape[-1] // 2)
        return self._kernels.silu_mul(gate_up) if has_code else self._plain.silu_mul(gate_up)

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """See Ops."""
        return self._plain.upload(arrays)

    def begin_step(self, batch: Batch) -> NativeCpuPagedStep:
        """See PagedOps."""
        states = None if self._states is None else self._states.begin_step(batch)
        entries = None if self._entries is None else self._entries.begin_step(batch)
        return NativeCpuPagedStep(batch, self._shape, self._groups, self._pool, self._kernels, None, states, entries)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See SamplerOps. The kernel takes bf16; processed logits are fp32."""
        return self._kernels.argmax(logits) if logits.dtype == torch.bfloat16 else self._plain.argmax(logits)

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        """See SamplerOps."""
        self._plain.penalize(logits, penalties, last_tokens)

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        """See SamplerOps."""
        self._plain.mask_tokens(logits, rows, bitmask)

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See SamplerOps."""
        return self._plain.draw_tokens(logits, rows)


class NativeCpuOps(NativeCpuPagedOps):
    """Implements Ops for a bf16 ``pool``."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        max_model_len: int,
        kernels: CpuKernels,
    ) -> None:
        """:meth:`CpuKernels.fit` must accept the model."""
        super().__init__(config, pool, kernels)
        self._config = config
        self._tables = cos_sin_rows(config, max_model_len, pool.dtype)

    def begin_step(self, batch: Batch) -> NativeCpuStep:
        """See Ops."""
        return NativeCpuStep(batch, self._config, self._groups, self._pool, self._kernels, self._tables)

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """See Ops."""
        return self._kernels.clamped_swiglu(gate_up, alpha, limit)

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops."""
        return self._kernels.rms_norm(hidden, residual, weight, eps)


def has_native_linear(kernels: CpuKernels, weight: Weight) -> bool:
    """Whether our product is faster than oneDNN's.

    It is not on processors with AMX, which oneDNN uses. Without bf16 dot products, ours (which multiplies floats) is used only if
    oneDNN has no bf16 on this processor at all.
    """
    if weight.shape[1] % 2:
        return False
    if kernels.has_bf16_dot_products:
        return not torch.cpu._is_amx_tile_supported()
    return not has_packed_linear(torch.bfloat16)
