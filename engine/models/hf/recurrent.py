"""Recurrent layers of transformers models that kernels compute for all sequences of a step at once.

A layer's own linear layers and its norm are called as they are, on all tokens. What stands between them is ours: transformers'
functions compute sequences of equal length, and without further packages in many small operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kvrelay.engine.config.model import StateTensor
from kvrelay.engine.kv.states import StateStep
from kvrelay.kernels.recurrent.ragged import DeltaInputs, SpaceInputs

Forward = Callable[[torch.Tensor, StateStep, int], torch.Tensor]
"""(hidden states ``[1, num_tokens, hidden]``, the states, the layer's number among recurrent ones) -> the same shape"""
_Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # mixed, gate, beta, decay


def whole_step_forward(model_type: str, layer: nn.Module, tensors: tuple[StateTensor, ...]) -> Forward | None:
    """The forward pass of a recurrent layer in a decoder of ``model_type``, over our kernels; None: there are none for it.

    ``tensors``: of its state.
    """
    make = _FORWARDS.get(model_type)
    is_wide = any((one.kind, one.dtype) == ("recurrent", "float32") for one in tensors)
    return make(layer) if make is not None and is_wide and getattr(layer, "activation", None) == "silu" else None


def _delta_rule(project: Callable[[Any, torch.Tensor], _Projections]) -> Callable[[Any], Forward]:
    def of_layer(layer: Any) -> Forward:
        def forward(hidden: torch.Tensor, step: StateStep, number: int) -> torch.Tensor:
            mixed, gate, beta, decay = project(layer, hidden)
            inputs = DeltaInputs(mixed[0], decay[0], beta[0], layer.A_log, layer.dt_bias)
            weight, bias = layer.conv1d.weight[:, 0], layer.conv1d.bias
            found = step.compute(number, lambda kernels, states: kernels.delta_rule(inputs, weight, bias, states))
            normed = layer.norm(found.flatten(0, 1), gate.reshape(-1, found.shape[-1]))
            output: torch.Tensor = layer.out_proj(normed.view(1, hidden.shape[1], -1))
            return output

        return forward

    return of_layer


def _by_key_heads(layer: Any, hidden: torch.Tensor) -> _Projections:
    """The rows of a key head and its value heads follow each other."""
    of_heads = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, decay = of_heads
    mixed = torch.cat([one.flatten(2) for one in (query, key, value)], dim=-1)
    # With a value head per key head these are views with gaps.
    return mixed, gate, beta.contiguous(), decay.contiguous()


def _by_kinds(layer: Any, hidden: torch.Tensor) -> _Projections:
    """Rows of all key heads, then of all value heads."""
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)


def _state_space(
    project: Callable[[Any, torch.Tensor], torch.Tensor],
    gated: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[Any], Forward]:
    def of_layer(layer: Any) -> Forward:
        def forward(hidden: torch.Tensor, step: StateStep, number: int) -> torch.Tensor:
            sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
            gate, mixed, steps = torch.split(project(layer, hidden), sizes, dim=-1)
            inputs = SpaceInputs(mixed[0], steps[0], layer.A_log, layer.dt_bias, layer.D, layer.time_step_limit)
            weight, bias = layer.conv1d.weight[:, 0], layer.conv1d.bias
            found = step.compute(number, lambda kernels, states: kernels.state_space(inputs, weight, bias, states))
            output: torch.Tensor = layer.out_proj(gated(layer, found.flatten(1)[None], gate).to(hidden.dtype))
            return output

        return forward

    return of_layer


_mamba = _state_space(
    lambda layer, hidden: layer.in_proj(hidden),
    lambda layer, found, gate: layer.norm(found, gate),
)
_falcon_h1 = _state_space(
    lambda layer, hidden: layer.in_proj(hidden * layer.ssm_in_multiplier) * layer.mup_vector,
    lambda layer, found, gate: layer.norm(found, gate) if layer.mamba_rms_norm else found * F.silu(gate),
)

# By type of the decoder. The tests run each type.
_FORWARDS: dict[str, Callable[[Any], Forward]] = {
    "bamba": _mamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _mamba,
    "mamba2": _mamba,
    "nemotron_h": _mamba,
    "qwen3_next": _delta_rule(_by_key_heads),
    "qwen3_5_text": _delta_rule(_by_kinds),
    "qwen3_5_moe_text": _delta_rule(_by_kinds),
}
