"""Experts on a GPU: one launch of our grouped kernel for each of the two products."""

from __future__ import annotations

import torch

from kvrelay.engine.models.ops import Activation
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.linear.grouped import ROWS_PER_EXPERT, Routes, grouped_linear, grouped_stored_linear, plan_routes


class CudaExperts:
    """Implements ``Experts`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        """Keeps ``weights`` unchanged."""
        self._weights = weights
        self._activation = activation

    def compile(self, device: torch.device) -> None:
        """Multiply one token with each kernel: compiling one later would stall running streams."""
        weights = self._weights
        token = torch.zeros(1, weights.gate_up.shape[1], dtype=weights.gate_up.dtype, device=device)
        expert_ids, factors = token.new_zeros(1, 1, dtype=torch.int64), token.new_ones(1, 1)
        for rows_per_expert in ROWS_PER_EXPERT:
            self._multiplied(token, plan_routes(expert_ids, weights.num_experts, rows_per_expert), factors)

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        num_experts = self._weights.num_experts
        out = self._multiplied(hidden, plan_routes(expert_ids, num_experts), factors)
        # Rows routed to no expert were not computed.
        return out.view(*expert_ids.shape, -1).masked_fill(expert_ids[:, :, None] == num_experts, 0).sum(dim=1)

    def _multiplied(self, hidden: torch.Tensor, routes: Routes, factors: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        gate_up = _multiply(hidden, weights.gate_up, weights.gate_up_bias, routes)
        return _multiply(self._activation(gate_up), weights.down, weights.down_bias, routes, factors)


def _multiply(
    rows: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    routes: Routes,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    if isinstance(weight, StoredWeight):
        assert weight.order is None, "experts whose inputs are not in order become full when they are loaded"
        stored = weight.values, weight.scale, weight.zero, weight.group_size
        return grouped_stored_linear(rows, *stored, routes, bias=bias, factors=factors)
    if isinstance(weight, RoundedWeight):
        return grouped_linear(rows, weight.values, routes, bias=bias, scale=weight.scale, factors=factors)
    return grouped_linear(rows, weight, routes, bias=bias, factors=factors)
