"""The operations on the CPU, in plain vectorised torch, with oneDNN's packed weights where the build has them.

Packing pays: measured on Zen 4 against ``F.linear``, a step of one row reads bf16 weights at 30 GB/s instead of 15, and fp32
products of 32 rows and more take less than half the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.engine.attention import AttentionPlan, AttentionScratch
from kvrelay.engine.batch import Batch
from kvrelay.engine.model_config import ModelConfig
from kvrelay.engine.rope import cos_sin_tables
from kvrelay.engine.sampler import SamplingRows, draw_tokens, penalize


class CpuStep:
    """Implements StepContext for one batch."""

    def __init__(
        self,
        batch: Batch,
        config: ModelConfig,
        pool: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        scratch: AttentionScratch,
    ) -> None:
        self._pool = pool
        self._windows = config.sliding_windows
        self._plans = {
            window: AttentionPlan(batch, pool, config.num_q_heads, window, scratch)
            for window in set(config.sliding_windows)
        }
        positions = torch.from_numpy(batch.positions)
        self._cos, self._sin = (table[positions][:, None, :] for table in tables)  # [num_tokens, 1, head_dim]
        slots = torch.from_numpy(batch.slot_mapping)
        block_size = pool.shape[4]
        self._block_ids = slots // block_size
        self._offsets = slots % block_size

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        heads = torch.cat((query, key), dim=1)
        # Rounded where the reference rounds: after each product and after the sum.
        first, second = heads.chunk(2, dim=-1)
        heads = (heads * self._cos).add_(torch.cat((second, first), dim=-1).mul_(self._sin))
        query, key = heads.split_with_sizes((query.shape[1], key.shape[1]), dim=1)
        # A broken sequence's NaN would outlive it: attention reads a block's unwritten tail under a mask, and 0 * NaN is NaN.
        kv = torch.stack((key, value), dim=1).nan_to_num_(0.0, 0.0, 0.0)
        self._pool[:, layer][self._block_ids, :, :, self._offsets] = kv
        return query

    def attention(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        out = query.new_empty(query.shape)
        self._plans[self._windows[layer]].run(query, layer, out)
        return out


class CpuOps:
    """Implements Ops. Cosines are kept in the model's dtype, as the reference implementations have them."""

    def __init__(self, config: ModelConfig, pool: torch.Tensor, max_model_len: int) -> None:
        self._config = config
        self._pool = pool
        cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
        # [max_model_len, head_dim]; the sine of the first half negative, so that a rotation needs no negation.
        self._tables = torch.cat((cos, cos), dim=-1).to(pool.dtype), torch.cat((-sin, sin), dim=-1).to(pool.dtype)
        self._scratch = AttentionScratch(pool.dtype)
        self._packs = _has_packed_linear(pool.dtype)

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        if not self._packs:
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed

    def linear(self, hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See Ops."""
        if not self._packs:
            return F.linear(hidden, packed, bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
        return product

    def begin_step(self, batch: Batch) -> CpuStep:
        """See Ops."""
        return CpuStep(batch, self._config, self._pool, self._tables, self._scratch)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        wide = hidden.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(self._config.rms_norm_eps).rsqrt_()
        return (wide * scale).to(hidden.dtype).mul_(weight)

    def add_rms_norm(self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self.rms_norm(residual.add_(hidden), weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def penalize(self, logits: torch.Tensor, rows: SamplingRows) -> None:
        """See Ops."""
        penalize(logits, rows)

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See Ops."""
        return draw_tokens(logits, rows)


def _has_packed_linear(dtype: torch.dtype) -> bool:
    """Whether torch was built with oneDNN, and oneDNN runs this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
