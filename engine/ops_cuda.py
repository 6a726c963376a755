"""The operations on a GPU: our Triton kernels. Imported only where there is one."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.engine.batch import Batch
from kvrelay.engine.filters import filter_typical_rows
from kvrelay.engine.model_config import ModelConfig
from kvrelay.engine.ops import Linear
from kvrelay.engine.penalties import Penalties
from kvrelay.engine.rope import cos_sin_tables
from kvrelay.engine.sampling_rows import SamplingRows
from kvrelay.kernels.activation import silu_mul
from kvrelay.kernels.decode_attention import DecodeWorkspace, paged_decode_attention
from kvrelay.kernels.norm import add_rms_norm, rms_norm
from kvrelay.kernels.penalties import apply_penalties
from kvrelay.kernels.prefill_attention import paged_prefill_attention
from kvrelay.kernels.rotary import rotary_kv_write
from kvrelay.kernels.sampling import sample

_MAX_SPLITS = 32


class CudaStep:
    """Implements StepContext for one batch: single-token rows by the decode kernel, the others by the prefill kernel."""

    def __init__(
        self,
        batch: Batch,
        config: ModelConfig,
        pool: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        workspace: DecodeWorkspace,
    ) -> None:
        device = pool.device
        self._config = config
        self._pool = pool
        self._cos, self._sin = tables
        self._workspace = workspace
        self._positions = torch.from_numpy(batch.positions).to(device)
        self._slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
        self._block_tables = torch.from_numpy(batch.block_tables.astype(np.int32)).to(device)
        self._seq_lens = torch.from_numpy(batch.seq_lens.astype(np.int32)).to(device)
        self._num_decode = batch.num_decode_rows
        prefill_starts = batch.query_start_loc[self._num_decode :] - self._num_decode
        self._query_start_loc = torch.from_numpy(prefill_starts.astype(np.int32)).to(device)
        self._has_prefill = self._num_decode < len(batch.rows)
        self._max_query_len = batch.max_query_len
        self._scale = config.head_dim**-0.5

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        rotary_kv_write(query, key, value, self._cos, self._sin, self._positions, self._pool, layer, self._slot_mapping)
        return query

    def attention(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        window, split = self._config.sliding_windows[layer], self._num_decode
        if split:
            paged_decode_attention(
                query[:split],
                self._pool,
                layer,
                self._block_tables[:split],
                self._seq_lens[:split],
                scale=self._scale,
                sliding_window=window,
                workspace=self._workspace,
                out=out[:split],
            )
        if self._has_prefill:
            paged_prefill_attention(
                query[split:],
                self._pool,
                layer,
                self._block_tables[split:],
                self._query_start_loc,
                self._seq_lens[split:],
                scale=self._scale,
                sliding_window=window,
                max_query_len=self._max_query_len,
                out=out[split:],
            )
        return out


class CudaOps:
    """Implements Ops."""

    def __init__(self, config: ModelConfig, pool: torch.Tensor, max_model_len: int, max_num_seqs: int) -> None:
        self._config = config
        self._pool = pool
        cos, sin = cos_sin_tables(config.rope, config.head_dim, max_model_len)
        self._tables = (cos.to(pool.device), sin.to(pool.device))
        self._workspace = DecodeWorkspace.allocate(
            max_num_seqs, config.num_q_heads, config.head_dim, _MAX_SPLITS, pool.device
        )

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See Ops. cuBLAS reads ``[out, in]`` as it is."""
        return lambda hidden: F.linear(hidden, weight, bias)

    def begin_step(self, batch: Batch) -> CudaStep:
        """See Ops."""
        return CudaStep(batch, self._config, self._pool, self._tables, self._workspace)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return rms_norm(hidden, weight, self._config.rms_norm_eps)

    def add_rms_norm(self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return add_rms_norm(hidden, residual, weight, self._config.rms_norm_eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return silu_mul(gate_up)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See SamplerOps."""
        return logits.argmax(dim=-1)

    def penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """See SamplerOps."""
        device = logits.device
        apply_penalties(
            logits,
            torch.tensor(penalties.entry_rows, dtype=torch.int64, device=device),
            torch.tensor(penalties.entry_tokens, dtype=torch.int64, device=device),
            torch.tensor(penalties.entry_counts, dtype=torch.int32, device=device),
            torch.from_numpy(penalties.repetition).to(device),
            torch.from_numpy(penalties.presence).to(device),
            torch.from_numpy(penalties.frequency).to(device),
        )

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See SamplerOps. The kernel's sums and draws are fp32: near a boundary it may take the neighbour of what the CPU takes.

        It knows no typical sampling: rows that ask for it come to it filtered.
        """
        device = logits.device
        rows = filter_typical_rows(logits, rows)
        # A draw next to 1 must not become 1.
        draws = np.minimum(rows.uniforms.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
        return sample(
            logits,
            torch.from_numpy(rows.temperature).to(device),
            torch.from_numpy(rows.top_k).to(device),
            torch.from_numpy(rows.top_p).to(device),
            torch.from_numpy(rows.min_p).to(device),
            torch.from_numpy(draws).to(device),
        )
