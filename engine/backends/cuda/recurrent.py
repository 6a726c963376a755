"""Recurrent layers on a GPU: our Triton kernels. Imported only where there is one."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrelay.engine.kv.states import LayerStates
from kvrelay.kernels.recurrent.convolution import causal_convolution
from kvrelay.kernels.recurrent.delta_rule import gated_delta_rule
from kvrelay.kernels.recurrent.ragged import DeltaInputs, SpaceInputs
from kvrelay.kernels.recurrent.state_space import state_space


class CudaRecurrentKernels:
    """Implements RecurrentKernels."""

    def delta_rule(
        self, inputs: DeltaInputs, weight: torch.Tensor, bias: torch.Tensor | None, states: LayerStates
    ) -> torch.Tensor:
        """See RecurrentKernels."""
        mixed = causal_convolution(inputs.mixed, weight, bias, states.conv, states.ragged)
        return gated_delta_rule(replace(inputs, mixed=mixed), states.recurrent, states.ragged)

    def state_space(
        self, inputs: SpaceInputs, weight: torch.Tensor, bias: torch.Tensor | None, states: LayerStates
    ) -> torch.Tensor:
        """See RecurrentKernels."""
        mixed = causal_convolution(inputs.mixed, weight, bias, states.conv, states.ragged)
        return state_space(replace(inputs, mixed=mixed), states.recurrent, states.ragged)
