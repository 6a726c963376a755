"""Experts on a GPU: one launch of our grouped kernel for each of the two products.

A few tokens, as in one stream's decode step, have kernels of their own (:mod:`kvrelay.kernels.linear.few_routes`): they sort
nothing, and apply the activation and add a token's experts themselves. They do not multiply weights in groups.
"""

from __future__ import annotations

from functools import partial

import torch

from kvrelay.engine.models.ops import Activation
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight, Weight
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.linear.few_routes import TOP_KS, ExpertMatrix, Gate, are_few_routes, few_down, few_gate_up
from kvrelay.kernels.linear.grouped import ROWS_PER_EXPERT, Routes, grouped_linear, grouped_stored_linear, plan_routes
from kvrelay.kernels.rows.activation import clamped_swiglu, silu_mul


class CudaExperts:
    """Implements ``Experts`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        """Keeps ``weights`` unchanged."""
        self._weights = weights
        self._activation = activation
        self._few = None
        gate_up, down = weights.gate_up, weights.down
        if not isinstance(gate_up, StoredWeight) and not isinstance(down, StoredWeight):
            matrices = _matrix(gate_up, weights.gate_up_bias), _matrix(down, weights.down_bias)
            self._few = _FewRoutes(weights.num_experts, *matrices, activation)

    def compile(self, device: torch.device) -> None:
        """Compute one token with each kernel: compiling one later would stall running streams."""
        weights = self._weights
        token = torch.zeros(1, weights.gate_up.shape[1], dtype=weights.gate_up.dtype, device=device)
        expert_ids, factors = token.new_zeros(1, 1, dtype=torch.int64), token.new_ones(1, 1)
        for rows_per_expert in ROWS_PER_EXPERT:
            self._multiplied(token, plan_routes(expert_ids, weights.num_experts, rows_per_expert), factors)
        if self._few is not None:
            for top_k in TOP_KS:
                self._few(token, expert_ids.repeat(1, top_k), factors.repeat(1, top_k))

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        num_experts = self._weights.num_experts
        if self._few is not None and are_few_routes(expert_ids.numel(), num_experts):
            return self._few(hidden, expert_ids.contiguous(), factors)
        out = self._multiplied(hidden, plan_routes(expert_ids, num_experts), factors)
        # Rows routed to no expert were not computed.
        return out.view(*expert_ids.shape, -1).masked_fill(expert_ids[:, :, None] == num_experts, 0).sum(dim=1)

    def _multiplied(self, hidden: torch.Tensor, routes: Routes, factors: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        gate_up = _multiply(hidden, weights.gate_up, weights.gate_up_bias, routes)
        return _multiply(self._activation(gate_up), weights.down, weights.down_bias, routes, factors)


class _FewRoutes:
    """The same layer for a few tokens: two launches, and the activation's between them if its kernel is not ours."""

    def __init__(self, num_experts: int, gate_up: ExpertMatrix, down: ExpertMatrix, activation: Activation) -> None:
        self._num_experts = num_experts
        self._gate_up, self._down = gate_up, down
        self._activation, self._gate = activation, _gate_of(activation)

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        rows = few_gate_up(hidden, self._gate_up, expert_ids, self._num_experts, self._gate)
        rows = rows if self._gate is not None else self._activation(rows)
        return few_down(rows, self._down, expert_ids, factors, self._num_experts)


def _gate_of(activation: Activation) -> Gate | None:
    """The activation as a part of the first product, or None."""
    if activation is silu_mul:
        return Gate()
    if isinstance(activation, partial) and activation.func is clamped_swiglu and not activation.args:
        return Gate(**activation.keywords)
    return None


def _matrix(weight: Weight, bias: torch.Tensor | None) -> ExpertMatrix:
    if isinstance(weight, RoundedWeight):
        return ExpertMatrix(weight.values, weight.scale, bias)
    return ExpertMatrix(weight, None, bias)


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
