"""silu(gate) * up against torch, tails and strides included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.activation import silu_mul, silu_mul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "intermediate"), [(3, 96), (2, 1536), (0, 8)])
def test_silu_mul(
    randn: Callable[..., torch.Tensor],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
    num_tokens: int,
    intermediate: int,
) -> None:
    # Wider than needed: the rows are strided.
    gate_up = randn(num_tokens, 2 * intermediate + 8, dtype=dtype)[:, : 2 * intermediate]
    out = silu_mul(gate_up)
    assert out.shape == (num_tokens, intermediate)
    assert_close(out, silu_mul_reference(gate_up.double()))


def test_odd_width_is_refused(randn: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="width 7"):
        silu_mul(randn(2, 7))
