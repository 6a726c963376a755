"""Experts on the CPU: rows are sorted by expert, and only the weights of experts that have rows are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.models.ops import Activation, Linear
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight

GroupedLinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(``[rows, in]``, starts ``[num_experts + 1]``) -> ``[rows, out]``; rows ``starts[e]`` to ``starts[e + 1]`` are expert e's."""
MakeGrouped = Callable[[AnyWeight, torch.Tensor | None, int], GroupedLinear]
"""Makes a GroupedLinear of (weight ``[num_experts * out, in]``, bias ``[num_experts * out]``, num_experts)."""


class SplitLinear:
    """One product per expert, for weights of any form."""

    def __init__(
        self,
        make_linear: Callable[[AnyWeight, torch.Tensor | None], Linear],
        weight: AnyWeight,
        bias: torch.Tensor | None,
        num_experts: int,
    ) -> None:
        num_outs = weight.shape[0] // num_experts
        parts = [slice(expert * num_outs, (expert + 1) * num_outs) for expert in range(num_experts)]
        self._linears = [make_linear(weight[part], None if bias is None else bias[part]) for part in parts]

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """See GroupedLinear."""
        parts = hidden.split_with_sizes(starts.diff().tolist())
        return torch.cat([linear(part) for linear, part in zip(self._linears, parts, strict=True) if len(part)])


class NativeGroupedLinear:
    """The products of all experts in one call of our bf16 kernel."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None, num_experts: int) -> None:
        """Repacks ``weight`` and does not keep it; ``in`` is even."""
        self._kernels = kernels
        self._panels = kernels.pack_weight(weight, num_experts)
        self._bias = None if bias is None else bias.float()
        self._num_outputs = len(weight) // num_experts

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """See GroupedLinear."""
        return self._kernels.grouped_linear(hidden.contiguous(), self._panels, self._bias, starts, self._num_outputs)


class CpuExperts:
    """Implements ``Experts`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(self, weights: ExpertWeights, activation: Activation, make: MakeGrouped) -> None:
        self._num_experts = weights.num_experts
        self._gate_up = make(weights.gate_up, weights.gate_up_bias, weights.num_experts)
        self._down = make(weights.down, weights.down_bias, weights.num_experts)
        self._activation = activation

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        num_tokens, top_k = expert_ids.shape
        routes = expert_ids.flatten()
        starts = F.pad(torch.bincount(routes, minlength=self._num_experts + 1)[:-1].cumsum(0), (1, 0))
        order = routes.argsort(stable=True)[: int(starts[-1])]
        out = torch.zeros(len(routes), hidden.shape[1], dtype=torch.float32)
        if not len(order):
            return out.view(num_tokens, top_k, -1).sum(dim=1).to(hidden.dtype)
        sorted_out = self._down(self._activation(self._gate_up(hidden[order // top_k], starts)), starts)
        out[order] = sorted_out * factors.flatten()[order, None].float()
        return out.view(num_tokens, top_k, -1).sum(dim=1).to(hidden.dtype)
