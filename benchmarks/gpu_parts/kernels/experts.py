"""A layer of experts: routes, both products, the activation and the sum, as the engine computes it.

The layer is launched kernel by kernel, as other kernels here are, and replayed from a CUDA graph, as in decode steps. It is many
small kernels, so launches may take longer than what they launch; a graph has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpu_parts.frame.floors import experts_bytes
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding
from gpu_parts.frame.sizes import ExpertShape
from gpu_parts.frame.timing import Stopwatch
from gpu_parts.kernels.linears import compute_dtype
from kvrelay.engine.backends.cuda.experts import CudaExperts
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.kernels.rows.activation import silu_mul

_BUDGET_S = 0.25
_MAX_DIFFERENCE = 2e-2  # relative, between two implementations in bf16
_PEER = "torch's grouped_mm"
_GOAL = Goal("≤ 1.4x the floor", Against.FLOOR, 1.4)

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Random weights, one expert below the other."""

    shape: ExpertShape
    gate_up: torch.Tensor  # [num_experts * 2 * intermediate, hidden]
    down: torch.Tensor  # [num_experts * hidden, intermediate]

    def experts(self) -> CudaExperts:
        """The engine's layer."""
        return CudaExperts(ExpertWeights(self.shape.num_experts, self.gate_up, None, self.down, None), silu_mul)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Random rows, and where a router sends them."""

    hidden: torch.Tensor  # [num_tokens, hidden]
    expert_ids: torch.Tensor  # [num_tokens, top_k] int64, distinct in each row
    factors: torch.Tensor  # [num_tokens, top_k] fp32, of sum 1


def random_layer(context: Context, generator: torch.Generator) -> ExpertLayer:
    """A layer whose results are about as large as its inputs."""
    shape, dtype = context.sizes.experts, compute_dtype(context)

    def drawn(num_rows: int, num_ins: int) -> torch.Tensor:
        values = torch.empty((num_rows, num_ins), dtype=dtype, device=context.device)
        return values.normal_(std=num_ins**-0.5, generator=generator)

    width = 2 * shape.intermediate_size
    return ExpertLayer(
        shape,
        drawn(shape.num_experts * width, shape.hidden_size),
        drawn(shape.num_experts * shape.hidden_size, shape.intermediate_size),
    )


def random_tokens(context: Context, generator: torch.Generator, num_tokens: int) -> Tokens:
    """Tokens of which each has other experts."""
    shape, device = context.sizes.experts, context.device
    hidden = torch.randn(num_tokens, shape.hidden_size, device=device, generator=generator)
    scores = torch.rand(num_tokens, shape.num_experts, device=device, generator=generator).topk(shape.top_k)
    factors = scores.values / scores.values.sum(dim=-1, keepdim=True)
    return Tokens(hidden.to(compute_dtype(context)), scores.indices, factors)


def measure_experts(context: Context) -> Iterator[Finding]:
    """Two rows for each batch. The floor is the bytes of the experts that have tokens."""
    stopwatch, generator = context.stopwatch(), context.generator()
    layer = random_layer(context, generator)
    experts = layer.experts()
    for num_tokens in context.sizes.expert_batches:
        tokens = random_tokens(context, generator, num_tokens)
        num_read = len(set(tokens.expert_ids.flatten().tolist()))
        nbytes = experts_bytes(layer.shape, num_tokens, num_read, layer.gate_up.itemsize)
        floor = None if context.limits is None else context.limits.bytes_s(nbytes)

        def ours(tokens: Tokens = tokens) -> torch.Tensor:
            return experts(tokens.hidden, tokens.expert_ids, tokens.factors)

        result, theirs = ours(), _grouped_mm(layer, tokens)
        for is_graph in (False, True):
            name = f"experts, {num_tokens} tokens" + (", in a CUDA graph" if is_graph else "")
            if is_graph and context.device.type != "cuda":
                yield Row(name, Unit.SECONDS, None, note="needs a GPU")
                continue
            try:
                seconds = stopwatch.median_s(_replay(ours) if is_graph else ours, budget_s=_BUDGET_S)
            except RuntimeError as error:
                if not is_graph:
                    raise
                yield Row(name, Unit.SECONDS, None, goals=(_GOAL,), note=_reason(error))
                continue
            yield Row(
                name,
                Unit.SECONDS,
                seconds,
                floor,
                (_GOAL,),
                (_peer(theirs, result, stopwatch, is_graph=is_graph),),
                f"{num_read} experts, {nbytes / 1e9:.2f} GB at {nbytes / seconds / 1e12:.2f} TB/s",
            )


def _replay(call: Call) -> Callable[[], object]:
    """Replays ``call``, which has run before: its kernels are compiled, and libraries have their workspaces."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _peer(call: Call, ours: torch.Tensor, stopwatch: Stopwatch, *, is_graph: bool) -> Peer:
    try:
        difference = float((call().double() - ours.double()).norm() / ours.double().norm())
        if not difference <= _MAX_DIFFERENCE:
            return Peer(_PEER, None, f"its result differs from ours by {difference:.1e}")
        return Peer(_PEER, stopwatch.median_s(_replay(call) if is_graph else call, budget_s=_BUDGET_S))
    except Exception as error:
        return Peer(_PEER, None, _reason(error))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def _grouped_mm(layer: ExpertLayer, tokens: Tokens) -> Call:
    """The same layer in torch: rows are gathered by expert, multiplied in two grouped products, and put back."""
    shape, expert_ids = layer.shape, tokens.expert_ids
    gate_up = layer.gate_up.view(shape.num_experts, -1, shape.hidden_size).transpose(1, 2)
    down = layer.down.view(shape.num_experts, shape.hidden_size, -1).transpose(1, 2)
    experts = torch.arange(shape.num_experts, device=expert_ids.device)
    factors = tokens.factors.to(layer.down.dtype).flatten()[:, None]

    def run() -> torch.Tensor:
        ordered, order = expert_ids.flatten().sort()
        ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
        gate, up = F.grouped_mm(tokens.hidden[order // shape.top_k], gate_up, offs=ends).chunk(2, dim=-1)
        products = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * factors[order]
        rows = torch.empty_like(products).index_copy_(0, order, products)
        return rows.view(*expert_ids.shape, -1).sum(dim=1)

    return run
