"""The operations that differ between CPU and GPU, behind one interface. Models are written once on top of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

from kvrelay.engine.kv.entries import EntryStep
from kvrelay.engine.kv.states import StateStep
from kvrelay.engine.models.low_rank import LowRankProducts
from kvrelay.engine.sampling.sampler import SamplerOps
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.step.slots import Slots
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight

Upload = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]
"""Arrays -> tensors of the same shapes and types on the device"""
Linear = Callable[[torch.Tensor], torch.Tensor]
"""``[n, in]`` -> ``[n, out]``"""
Activation = Callable[[torch.Tensor], torch.Tensor]
"""``[n, width]`` -> ``[n, intermediate]``, row by row"""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(``[n, hidden]``, expert ids ``[n, k]`` int64, factors ``[n, k]``) -> ``[n, hidden]``: the sum of the experts' outputs times
factors. The id after the last expert's stands for no expert, which adds nothing.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer's attention scores differ from ``query @ key / sqrt(head_dim)``."""

    scale: float | None = None  # instead of 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [num_q_heads]: per head, the score of one more key that has no value


PLAIN = Scores()


class PagedStep(Protocol):
    """One step's tokens, with their keys and values in the pool."""

    @property
    def positions(self) -> torch.Tensor:
        """``[num_tokens]`` int64, on the device."""

    @property
    def states(self) -> StateStep | None:
        """The states of the sequences in the step; None for a model that has none."""

    @property
    def entries(self) -> EntryStep | None:
        """What layers keep that compress their tokens; None for a model that has none."""

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Write the step's keys and values into the pool, both ``[num_tokens, num_kv_heads, size]`` with the layer's sizes."""

    def attention(self, query: torch.Tensor, layer: int, scores: Scores = PLAIN) -> torch.Tensor:
        """Causal attention over the pool within the layer's window.

        Where ``ModelShape.sees_ahead``, a token sees keys up to its ``Batch.last_seen``. Its window, or its chunk, begins by its
        own position all the same: the last tokens of an image that is longer than the window do not see the first ones.
        transformers masks Gemma 3 so: what is in the window, and either before the token or in its image.

        ``query`` ``[num_tokens, num_q_heads, key_size]`` -> ``[num_tokens, num_q_heads, value_size]``.
        """


class StepContext(PagedStep, Protocol):
    """One step of a model with our own layers."""

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotate q and k by their positions, and write k and v into the pool. Returns the rotated q.

        q ``[num_tokens, num_q_heads, head_dim]``, k and v ``[num_tokens, num_kv_heads, head_dim]``; q may be changed in place.
        """


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What an indexer asks for the tokens of a step (:class:`kvrelay.engine.config.latent.IndexerConfig`).

    The score of a key for a token is ``(weights * relu(query @ key)).sum()`` over the heads.
    """

    query: torch.Tensor  # [num_tokens, num_heads, size]
    weights: torch.Tensor  # [num_tokens, num_heads] fp32


class LatentStep(Protocol):
    """One step of a model whose tokens keep latents (:class:`kvrelay.engine.config.latent.LatentConfig`)."""

    @property
    def positions(self) -> torch.Tensor:
        """``[num_tokens]`` int64, on the device."""

    @property
    def longest(self) -> int:
        """The most tokens that a token of the step sees, or an upper bound of it. The device is not asked."""

    def latent_write(self, latents: torch.Tensor, layer: int) -> None:
        """Write the tokens' rows ``[num_tokens, row_size]`` into a pool of latents: latents, then the indexer's keys."""

    def pick(self, index: IndexQueries, topk: int, layer: int) -> None:
        """Let each token attend only to the ``topk`` tokens of the highest scores of those that it sees, of equal scores to the
        first ones.

        This holds for ``latent_attention`` of ``layer``, whose rows are written, and of later layers until the next call.
        ``topk`` must be less than ``longest``.
        """

    def latent_attention(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Causal attention of ``query`` ``[num_tokens, num_q_heads, size]`` over latents, which are the keys of all heads. Over the
        tokens that ``pick`` has picked, if it was called.

        A latent's first ``rank`` numbers are its value. Returns ``[num_tokens, num_q_heads, rank]``.
        """


class StepGraphs(Protocol):
    """Prepared steps of one kind (:class:`kvrelay.engine.backends.cuda.graphs.DecodeGraphs`)."""

    def fits(self, batch: Batch) -> bool:
        """Whether a graph can run the batch."""

    def run(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[num_rows, vocab]`` of a batch that ``fits``, for its ``token_ids`` ``[num_rows]`` on the device.

        They are valid until the next call, and may be changed in place: launch the sampling before that.
        """

    def heard(self, num_rows: int) -> list[torch.Tensor]:
        """The inputs of the layers that a head reads, in order, then the hidden states behind the last norm, ``[num_rows, hidden]``
        each, of the batch that ``run`` was called with. Valid as long as its logits. Empty unless captured for a head.
        """


class Model(Protocol):
    """A forward pass over paged K/V."""

    def encode(self, plan: StepPlan, slots: Slots) -> None:
        """Encode the images that ``plan`` begins to compute, so that ``begin_step`` need not. ``slots``: before the plan.

        Raises as ``begin_step``.
        """

    def begin_step(self, batch: Batch, slots: Slots, upload: Upload) -> None:
        """Prepare what the step that ``forward`` computes next has beside token ids: images, and positions of their own.

        Raises ValueError if the step has what the model cannot take.
        """

    def forward(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor | None:
        """Hidden states ``[num_tokens, hidden]``, or None if a later stage has them. Side effect: writes all tokens' K/V into the
        pool.

        ``step``: made by the operations' ``begin_step``.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]``"""


class StepOps(SamplerOps, Protocol):
    """The sampler's operations, and steps for a model."""

    def begin_step(self, batch: Batch) -> Any:
        """The step that the model's ``forward`` takes."""


class PagedOps(SamplerOps, Protocol):
    """A device's operations for models that bring their own layers, including the sampler's."""

    def begin_step(self, batch: Batch) -> PagedStep:
        """Prepare one step's indices on the device."""

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        """The product with ``weight`` ``[out, in]`` plus ``bias`` ``[out]``, in the fastest layout of this device."""

    def make_experts(self, weights: ExpertWeights, activation: Activation) -> Experts:
        """A layer of experts, in the fastest layout of this device. It does not read experts that no token goes to."""

    def make_low_rank(self, dtype: torch.dtype) -> LowRankProducts:
        """Products with adapters' matrices of this dtype, which is the model's."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, computed in fp32."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate]``."""


class Ops(PagedOps, Protocol):
    """A device's operations for models with our own layers."""

    def begin_step(self, batch: Batch) -> StepContext:
        """Prepare one step's indices on the device."""

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``residual += hidden`` in place. Returns the norm of the result."""

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """:class:`kvrelay.engine.config.experts.ClampedSwiglu` of ``[num_tokens, 2 * intermediate]``."""
