"""Products with weight matrices on the CPU, against exact ones."""

from __future__ import annotations

import pytest
import torch

from kvrelay.engine.backends.cpu.linear import Int8Linear, PackedLinear, PlainLinear, has_packed_linear
from kvrelay.engine.weights.rounding import Rounding, rounded


def matrices(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, 96, generator=generator).bfloat16()
    weight = torch.randn(80, 96, generator=generator).bfloat16()
    weight[7] = 0
    weight[8] *= 1000  # each row has its own scale
    return hidden, weight, torch.randn(80, generator=generator).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 4, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("many_rows", [PlainLinear, PackedLinear])
def test_int8_products_are_exact_but_for_the_rounded_weights(
    num_rows: int, has_bias: bool, many_rows: type[PlainLinear] | type[PackedLinear]
) -> None:
    if many_rows is PackedLinear and not has_packed_linear(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    hidden, weight, bias = matrices(num_rows)
    kept_bias = bias if has_bias else None
    scale = (weight.float().abs().amax(dim=1) / 127).bfloat16().double().clamp(min=1e-30)
    wanted = (weight.double() / scale[:, None]).round().clamp(-127, 127) * scale[:, None]
    exact = hidden.double() @ wanted.T + (bias.double() if has_bias else 0)
    linear = Int8Linear(rounded(weight, Rounding.INT8), kept_bias, lambda integers: many_rows(integers, None))
    result = linear(hidden)
    assert result.dtype == torch.bfloat16
    # At most three roundings to bf16: of the sum, after the scale, after the bias.
    torch.testing.assert_close(result.double(), exact, rtol=3 * 2**-8, atol=0.05)
    # Rounding moves a weight by half a step at most.
    assert ((wanted - weight.double()).abs() <= 0.5001 * scale[:, None] + 2**-8 * weight.double().abs()).all()


@pytest.mark.parametrize("num_ins", [20, 40])
def test_int8_products_of_widths_that_torchs_kernel_reads_beyond(num_ins: int) -> None:
    """It may crash for these, or give any numbers."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, num_ins, generator=generator).bfloat16()
    weight = rounded(torch.randn(80, num_ins, generator=generator).bfloat16(), Rounding.INT8)
    result = Int8Linear(weight, None, lambda integers: PlainLinear(integers, None))(hidden)
    exact = hidden.double() @ weight.dequantised().double().T
    torch.testing.assert_close(result.double(), exact, rtol=2 * 2**-8, atol=0.05)


@pytest.mark.parametrize("linear", [PlainLinear, PackedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_products(linear: type[PlainLinear] | type[PackedLinear], dtype: torch.dtype) -> None:
    if linear is PackedLinear and not has_packed_linear(dtype):
        pytest.skip(f"this CPU has no packed {dtype} kernels")
    hidden, weight, bias = (tensor.to(dtype) for tensor in matrices(9))
    exact = hidden.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(
        linear(weight, bias)(hidden).double(),
        exact,
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-3 + torch.finfo(dtype).eps,
    )
