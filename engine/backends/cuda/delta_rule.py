"""Gated delta rules on a GPU: our Triton kernels. Imported only where there is one."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrelay.engine.kv.states import DeltaStates
from kvrelay.kernels.recurrent.convolution import causal_convolution
from kvrelay.kernels.recurrent.delta_rule import gated_delta_rule
from kvrelay.kernels.recurrent.ragged import DeltaInputs


def compute_delta_rule(inputs: DeltaInputs, weight: torch.Tensor, states: DeltaStates) -> torch.Tensor:
    """See DeltaRule."""
    mixed = causal_convolution(inputs.mixed, weight, states.conv, states.ragged)
    return gated_delta_rule(replace(inputs, mixed=mixed), states.recurrent, states.ragged)
