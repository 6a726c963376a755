"""The weights of a layer of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.weights.rounding import Weight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Two products of each expert, with an activation between them. Experts lie one below the other."""

    num_experts: int
    gate_up: Weight  # [num_experts * width, hidden]; the activation makes ``intermediate`` numbers of ``width``
    gate_up_bias: torch.Tensor | None  # [num_experts * width]
    down: Weight  # [num_experts * hidden, intermediate]
    down_bias: torch.Tensor | None  # [num_experts * hidden]
