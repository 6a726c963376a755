"""The part of a layer after attention: an MLP, or experts with their router."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kvrelay.engine.config.experts import Router
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.adapted_layers import LayerAdapters
from kvrelay.engine.models.ops import Activation, Linear, Ops
from kvrelay.engine.models.routing import route
from kvrelay.engine.weights.parameters import MlpWeights, SparseWeights


def make_mlp(config: ModelConfig, weights: MlpWeights | SparseWeights, ops: Ops, adapt: LayerAdapters) -> Linear:
    """``[num_tokens, hidden]`` -> the same shape. Adapters cannot change routed experts."""
    swiglu = config.clamped_swiglu
    activation = ops.silu_mul if swiglu is None else partial(ops.clamped_swiglu, alpha=swiglu.alpha, limit=swiglu.limit)
    if isinstance(weights, MlpWeights):
        return _Mlp(weights, activation, ops, adapt, is_shared=False)
    assert config.experts is not None, f"{config.architecture} has no experts"
    return _Sparse(config.experts.router, weights, activation, ops, adapt)


class _Mlp:
    def __init__(
        self, weights: MlpWeights, activation: Activation, ops: Ops, adapt: LayerAdapters, *, is_shared: bool
    ) -> None:
        self._gate_up = adapt.gate_up(ops.make_linear(weights.gate_up, weights.gate_up_bias), is_shared=is_shared)
        self._activation = activation
        self._down = adapt.down(ops.make_linear(weights.down, weights.down_bias), is_shared=is_shared)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(self._gate_up(hidden)))


class _Sparse:
    def __init__(
        self, router: Router, weights: SparseWeights, activation: Activation, ops: Ops, adapt: LayerAdapters
    ) -> None:
        self._router = router
        self._choice_bias = weights.choice_bias
        self._logits = _wide(weights) if router.is_wide else ops.make_linear(weights.router, weights.router_bias)
        self._experts = ops.make_experts(weights.experts, activation)
        self._first = weights.first_expert
        self._num_experts = weights.experts.num_experts
        shared = weights.shared
        self._shared = None if shared is None else _Mlp(shared, activation, ops, adapt, is_shared=True)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        expert_ids, factors = route(self._logits(hidden), self._router, self._choice_bias)
        if self._num_experts < self._router.num_experts:
            own = expert_ids - self._first
            expert_ids = own.masked_fill_((own < 0) | (own >= self._num_experts), self._num_experts)
        output = self._experts(hidden, expert_ids, factors)
        return output if self._shared is None else output.add_(self._shared(hidden))


def _wide(weights: SparseWeights) -> Linear:
    """A product in float32 for router logits: rounding must not swap experts that are nearly equal."""
    weight = weights.router.float()
    bias = None if weights.router_bias is None else weights.router_bias.float()
    return lambda hidden: F.linear(hidden.float(), weight, bias)
