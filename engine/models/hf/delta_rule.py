"""Layers of transformers models with a gated delta rule, which kernels compute for all sequences of a step at once.

The layer's own linear layers and its norm are called as they are, on all tokens. What stands between them is ours: transformers'
functions compute sequences of equal length, and without further packages in many small operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvrelay.engine.config.model import StateTensor
from kvrelay.engine.kv.states import StateStep
from kvrelay.kernels.recurrent.ragged import DeltaInputs

Forward = Callable[[torch.Tensor, StateStep, int], torch.Tensor]
"""(hidden states ``[1, num_tokens, hidden]``, the states, the layer's number among recurrent ones) -> the same shape"""
_Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # mixed, gate, beta, decay


def delta_rule_forward(model_type: str, module: nn.Module, tensors: tuple[StateTensor, ...]) -> Forward | None:
    """The forward pass of a recurrent layer in a decoder of ``model_type``, over our kernels; None: the layer is another one.

    ``tensors``: of its state.
    """
    layer: Any = module
    project = _PROJECTIONS.get(model_type)
    is_wide = any((one.kind, one.dtype) == ("recurrent", "float32") for one in tensors)
    if project is None or not is_wide or getattr(layer, "activation", None) != "silu":
        return None

    def forward(hidden: torch.Tensor, step: StateStep, number: int) -> torch.Tensor:
        mixed, gate, beta, decay = project(layer, hidden)
        inputs = DeltaInputs(mixed[0], decay[0], beta[0], layer.A_log, layer.dt_bias)
        found = step.compute(number, inputs, layer.conv1d.weight[:, 0])
        normed = layer.norm(found.flatten(0, 1), gate.reshape(-1, found.shape[-1]))
        output: torch.Tensor = layer.out_proj(normed.view(1, hidden.shape[1], -1))
        return output

    return forward


def _by_key_heads(layer: Any, hidden: torch.Tensor) -> _Projections:
    """The rows of a key head and its value heads follow each other."""
    of_heads = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, decay = of_heads
    return torch.cat([one.flatten(2) for one in (query, key, value)], dim=-1), gate, beta, decay


def _by_kinds(layer: Any, hidden: torch.Tensor) -> _Projections:
    """Rows of all key heads, then of all value heads."""
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)


# By type of the decoder. The tests run each type.
_PROJECTIONS: dict[str, Callable[[Any, torch.Tensor], _Projections]] = {
    "qwen3_next": _by_key_heads,
    "qwen3_5_text": _by_kinds,
    "qwen3_5_moe_text": _by_kinds,
}
