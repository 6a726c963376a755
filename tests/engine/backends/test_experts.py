"""A layer of experts on the CPU, and the GPU's code over torch's products, against each token's experts one by one; a GPU's few
tokens against many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cpu.build import load_kernels
from kvrelay.engine.backends.cpu.native import CpuKernelsError
from kvrelay.engine.backends.cpu.native_ops import NativeCpuPagedOps
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.backends.cuda import experts as cuda_experts
from kvrelay.engine.backends.cuda.experts import CudaExperts
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import Rounding, rounded
from kvrelay.kernels.rows.activation import clamped_swiglu, silu_mul
from tests.engine.shapes import ONE_LAYER

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 5, 2, 96, 48


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def layer(dtype: torch.dtype, *, has_bias: bool = True) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    return ExpertWeights(
        NUM_EXPERTS,
        randn(NUM_EXPERTS * 2 * INTERMEDIATE, HIDDEN),
        randn(NUM_EXPERTS * 2 * INTERMEDIATE) if has_bias else None,
        randn(NUM_EXPERTS * HIDDEN, INTERMEDIATE),
        randn(NUM_EXPERTS * HIDDEN) if has_bias else None,
    )


def tokens(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, expert ids (never the last expert) and factors."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    return hidden, scores.topk(TOP_K).indices, torch.rand(num_tokens, TOP_K, generator=generator)


def one_by_one(weights: ExpertWeights, hidden: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The layer's result in float64, token by token."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    gate_up, down = (w.dequantised() if not isinstance(w, torch.Tensor) else w for w in (weights.gate_up, weights.down))
    for token, (row, experts) in enumerate(zip(hidden.double(), ids.tolist(), strict=True)):
        for place, expert in enumerate(experts):
            first = gate_up.double().view(NUM_EXPERTS, -1, HIDDEN)[expert] @ row
            if weights.gate_up_bias is not None:
                first = first + weights.gate_up_bias.double().view(NUM_EXPERTS, -1)[expert]
            second = down.double().view(NUM_EXPERTS, HIDDEN, -1)[expert] @ swiglu(first)
            if weights.down_bias is not None:
                second = second + weights.down_bias.double().view(NUM_EXPERTS, -1)[expert]
            out[token] += second * factors[token, place]
    return out


def native_ops() -> Any:
    try:
        kernels = load_kernels(EngineOptions(None, ""), torch.bfloat16)  # type: ignore[arg-type]  # no model is read
    except CpuKernelsError as error:
        pytest.skip(str(error))
    return NativeCpuPagedOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1, dtype=torch.bfloat16), kernels)


def plain_ops(dtype: torch.dtype) -> CpuPagedOps:
    return CpuPagedOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1, dtype=dtype))


OPS: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "float32": (lambda: plain_ops(torch.float32), torch.float32),
    "bfloat16": (lambda: plain_ops(torch.bfloat16), torch.bfloat16),
    "native": (native_ops, torch.bfloat16),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", OPS)
def test_a_layer_is_the_sum_of_its_experts(kind: str, has_bias: bool) -> None:
    make_ops, dtype = OPS[kind]
    weights = layer(dtype, has_bias=has_bias)
    experts = make_ops().make_experts(weights, swiglu)
    for num_tokens in (1, 2, 9, 250):
        given = tokens(num_tokens, dtype)
        out = experts(*given)
        assert out.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(out.double(), one_by_one(weights, *given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", OPS)
def test_the_id_behind_the_last_expert_adds_nothing(kind: str) -> None:
    """The id after the last expert stands for experts of other ranks. They add nothing, even if no token has an expert
    here."""
    make_ops, dtype = OPS[kind]
    experts = make_ops().make_experts(layer(dtype), swiglu)
    hidden, ids, factors = tokens(9, dtype)
    others = ids.clone()
    others[:, 1] = NUM_EXPERTS
    expected = experts(hidden, ids, factors * torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(experts(hidden, others, factors), expected)
    assert not experts(hidden, torch.full_like(ids, NUM_EXPERTS), factors).any()


def test_int8_weights() -> None:
    full, ops = layer(torch.bfloat16), native_ops()
    assert isinstance(full.gate_up, torch.Tensor)
    assert isinstance(full.down, torch.Tensor)
    gate_up, down = rounded(full.gate_up, Rounding.INT8), rounded(full.down, Rounding.INT8)
    weights = ExpertWeights(NUM_EXPERTS, gate_up, full.gate_up_bias, down, full.down_bias)
    given = tokens(9, torch.bfloat16)
    out = ops.make_experts(weights, swiglu)(*given)
    torch.testing.assert_close(out.double(), one_by_one(weights, *given), rtol=0.03, atol=0.03)


def test_a_tokens_result_does_not_depend_on_what_is_beside_it() -> None:
    experts = native_ops().make_experts(layer(torch.bfloat16), swiglu)
    hidden, ids, factors = tokens(120, torch.bfloat16)
    together = experts(hidden, ids, factors)
    for rows in (slice(0, 1), slice(3, 8), slice(20, 90)):
        assert torch.equal(experts(hidden[rows], ids[rows], factors[rows]), together[rows])
    hidden[7] = float("nan")
    assert torch.equal(experts(hidden, ids, factors)[8:], together[8:])


def on(device: str, weights: ExpertWeights) -> ExpertWeights:
    gate_up, gate_up_bias, down, down_bias = (
        None if part is None else part.to(device)  # type: ignore[union-attr]  # full weights
        for part in (weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias)
    )
    assert gate_up is not None
    assert down is not None
    return ExpertWeights(weights.num_experts, gate_up, gate_up_bias, down, down_bias)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy about rows for another rank's experts
@pytest.mark.parametrize("rounding", [None, Rounding.INT8])
@pytest.mark.parametrize("activation", [silu_mul, partial(clamped_swiglu, alpha=1.702, limit=0.5), swiglu])
def test_few_tokens_on_a_gpu_give_what_many_give(
    monkeypatch: pytest.MonkeyPatch, activation: Callable[[torch.Tensor], torch.Tensor], rounding: Rounding | None
) -> None:
    """Few tokens have kernels of their own, which sort nothing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = on(device, layer(torch.float16))
    if rounding is not None:
        gate_up, down = (rounded(weight, rounding) for weight in (weights.gate_up, weights.down))  # type: ignore[arg-type]
        weights = replace(weights, gate_up=gate_up, down=down)
    experts = CudaExperts(weights, activation)
    hidden, ids, factors = (given.to(device) for given in tokens(9, torch.float16))
    ids[1, 0] = NUM_EXPERTS  # an expert of another rank
    many = experts(hidden, ids, factors)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_experts, "plan_routes", None)
        for rows in (slice(0, 1), slice(0, 2)):
            torch.testing.assert_close(
                experts(hidden[rows], ids[rows], factors[rows]), many[rows], rtol=2e-3, atol=1e-3
            )


def test_expert_ids_of_few_tokens_may_be_strided() -> None:
    """A router of transformers may give a view. Many tokens' ids may be one, too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = CudaExperts(on(device, layer(torch.float16)), silu_mul)
    hidden, ids, factors = (given.to(device) for given in tokens(2, torch.float16))
    assert torch.equal(experts(hidden, ids.T.contiguous().T, factors), experts(hidden, ids, factors))


def test_the_gpus_operations_have_the_activations_that_few_tokens_fuse() -> None:
    assert CudaOps.silu_mul is silu_mul
    assert CudaOps.clamped_swiglu is clamped_swiglu
