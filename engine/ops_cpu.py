"""The operations on the CPU, in plain vectorised torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.engine.attention import AttentionPlan
from kvrelay.engine.batch import Batch
from kvrelay.engine.model_config import ModelConfig
from kvrelay.engine.rope import cos_sin_tables


class CpuStep:
    """Implements StepContext for one batch."""

    def __init__(
        self, batch: Batch, config: ModelConfig, pool: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self._pool = pool
        self._windows = config.sliding_windows
        self._plans = {
            window: AttentionPlan(batch, pool, config.num_q_heads, window) for window in set(config.sliding_windows)
        }
        positions = torch.from_numpy(batch.positions)
        self._cos = cos[positions][:, None, :]  # [num_tokens, 1, head_dim]
        self._sin = sin[positions][:, None, :]
        slots = torch.from_numpy(batch.slot_mapping)
        block_size = pool.shape[4]
        self._block_ids = slots // block_size
        self._offsets = slots % block_size

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        self._pool[:, layer, 0][self._block_ids, :, self._offsets] = self._rotate(key)
        self._pool[:, layer, 1][self._block_ids, :, self._offsets] = value
        return self._rotate(query)

    def attention(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        out = torch.empty_like(query)
        self._plans[self._windows[layer]].run(query, layer, out)
        return out

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * self._cos + torch.cat((-second, first), dim=-1) * self._sin


class CpuOps:
    """Implements Ops. Cosines are kept in the model's dtype, as the reference implementations have them."""

    def __init__(self, config: ModelConfig, pool: torch.Tensor, max_model_len: int) -> None:
        self._config = config
        self._pool = pool
        cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
        self._cos = torch.cat((cos, cos), dim=-1).to(pool.dtype)  # [max_model_len, head_dim]
        self._sin = torch.cat((sin, sin), dim=-1).to(pool.dtype)

    def begin_step(self, batch: Batch) -> CpuStep:
        """See Ops."""
        return CpuStep(batch, self._config, self._pool, self._cos, self._sin)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * (wide * scale).to(hidden.dtype)

    def add_rms_norm(self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self.rms_norm(residual.add_(hidden), weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
