"""The operations that differ between CPU and GPU, behind one interface; the model is written once on top of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.engine.sampling.sampler import SamplerOps
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.weights.rounding import Weight

Linear = Callable[[torch.Tensor], torch.Tensor]
"""``[n, in]`` -> ``[n, out]``"""


class StepContext(Protocol):
    """What the layers of one step need beside their activations."""

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotate q and k to their positions, write k and v into the pool, return the rotated q.

        q ``[num_tokens, num_q_heads, head_dim]``, k and v ``[num_tokens, num_kv_heads, head_dim]``; q may be changed in place.
        """

    def attention(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Causal attention over the pool, ``[num_tokens, num_q_heads, head_dim]``."""


class StepGraphs(Protocol):
    """Whole steps of a kind, prepared (:class:`kvrelay.engine.backends.cuda.graphs.DecodeGraphs`)."""

    def fits(self, batch: Batch) -> bool:
        """Whether the batch is of that kind."""

    def run(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[num_rows, vocab]`` of a batch that ``fits``, for its ``token_ids`` ``[num_rows]`` on the device.

        They last until the next call, and may be changed: whoever samples from them launches that before.
        """


class Ops(SamplerOps, Protocol):
    """A device's operations, the sampler's among them."""

    def begin_step(self, batch: Batch) -> StepContext:
        """Prepare one step's indices on the device."""

    def make_linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """The product with ``weight`` ``[out, in]``, plus ``bias`` ``[out]``, in whatever layout is fastest here."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, computed in fp32."""

    def add_rms_norm(self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``residual += hidden`` in place, then its norm."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate]``."""
