"""What stands behind attention in a layer: an MLP, or experts with their router."""

from __future__ import annotations

from functools import partial

import torch

from kvrelay.engine.config.experts import Router
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.ops import Activation, Linear, Ops
from kvrelay.engine.models.routing import route
from kvrelay.engine.weights.parameters import MlpWeights, SparseWeights


def make_mlp(config: ModelConfig, weights: MlpWeights | SparseWeights, ops: Ops) -> Linear:
    """``[num_tokens, hidden]`` in the same shape."""
    swiglu = config.clamped_swiglu
    activation = ops.silu_mul if swiglu is None else partial(ops.clamped_swiglu, alpha=swiglu.alpha, limit=swiglu.limit)
    if isinstance(weights, MlpWeights):
        return _Mlp(weights, activation, ops)
    assert config.experts is not None, f"{config.architecture} has no experts"
    return _Sparse(config.experts.router, weights, activation, ops)


class _Mlp:
    def __init__(self, weights: MlpWeights, activation: Activation, ops: Ops) -> None:
        self._gate_up = ops.make_linear(weights.gate_up, weights.gate_up_bias)
        self._activation = activation
        self._down = ops.make_linear(weights.down, weights.down_bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(self._gate_up(hidden)))


class _Sparse:
    def __init__(self, router: Router, weights: SparseWeights, activation: Activation, ops: Ops) -> None:
        self._router = router
        self._logits = ops.make_linear(weights.router, weights.router_bias)
        self._experts = ops.make_experts(weights.experts, activation)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        expert_ids, factors = route(self._logits(hidden), self._router)
        return self._experts(hidden, expert_ids, factors)
