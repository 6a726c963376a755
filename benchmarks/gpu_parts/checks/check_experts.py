"""Checks a layer of experts against float64, with a batch for each kernel of the grouped products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from gpu_parts.checks.comparing import compared
from gpu_parts.frame.rows import Kernel
from gpu_parts.frame.running import Context, Finding
from gpu_parts.kernels.experts import ExpertLayer, Tokens, random_layer, random_tokens


def check_experts(context: Context) -> Iterator[Finding]:
    """Compute as the engine does: routes, gate-up, activation, down with factors, and the sum of a token's experts."""
    generator, shape = context.generator(), context.sizes.experts
    layer = random_layer(context, generator)
    experts = layer.experts()
    for num_tokens in context.sizes.expert_checks:
        tokens = random_tokens(context, generator, num_tokens)
        out = experts(tokens.hidden, tokens.expert_ids, tokens.factors)
        rows = num_tokens * shape.top_k / shape.num_experts
        case = f"{num_tokens} tokens, {rows:.2g} rows per expert"
        yield from compared(Kernel.EXPERTS, case, out, experts_float64(layer, tokens))


def experts_float64(layer: ExpertLayer, tokens: Tokens) -> torch.Tensor:
    """The layer's result ``[num_tokens, hidden]`` in float64, expert by expert, without any rounding."""
    shape, hidden = layer.shape, tokens.hidden.double()
    gate_ups = layer.gate_up.view(shape.num_experts, -1, shape.hidden_size)
    downs = layer.down.view(shape.num_experts, shape.hidden_size, -1)
    out = torch.zeros_like(hidden)
    for expert in range(shape.num_experts):
        rows, places = (tokens.expert_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[rows] @ gate_ups[expert].double().T).chunk(2, dim=-1)
        products = (F.silu(gate) * up) @ downs[expert].double().T
        out.index_add_(0, rows, products * tokens.factors[rows, places, None].double())
    return out
