"""silu(gate) * up against torch, with tails and strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.rows.activation import clamped_swiglu, clamped_swiglu_reference, silu_mul, silu_mul_reference
from tests.kernels.conftest import DTYPES


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "intermediate"), [(3, 96), (2, 1536), (0, 8)])
def test_silu_mul(
    randn: Callable[..., torch.Tensor],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
    num_tokens: int,
    intermediate: int,
) -> None:
    # Wider than needed, so that the rows are strided.
    gate_up = randn(num_tokens, 2 * intermediate + 8, dtype=dtype)[:, : 2 * intermediate]
    out = silu_mul(gate_up)
    assert out.shape == (num_tokens, intermediate)
    assert_close(out, silu_mul_reference(gate_up.double()))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_swiglu(
    randn: Callable[..., torch.Tensor], assert_close: Callable[[torch.Tensor, torch.Tensor], None], dtype: torch.dtype
) -> None:
    gate_up = (randn(5, 2 * 96) * 3).to(dtype)  # some values beyond the limit, on both sides
    assert (gate_up.abs() > 5).any()
    assert_close(clamped_swiglu(gate_up, 1.702, 5.0), clamped_swiglu_reference(gate_up.double(), 1.702, 5.0))


def test_offsets_beyond_31_bits(device: str, randn: Callable[..., torch.Tensor]) -> None:
    """Three rows are 2**30 elements apart, so the last starts at 2**31. Untouched pages take no memory."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((3, 64), (2**30, 1))
    near = randn(3, 64, dtype=torch.bfloat16)
    far.copy_(near)
    assert torch.equal(silu_mul(far), silu_mul(near))


def test_wrong_arguments_are_refused(randn: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"gate_up has shape \(8,\), expected \[num_tokens, 2 \* intermediate\]"):
        silu_mul(randn(8))
    with pytest.raises(ValueError, match=r"gate_up has dtype torch\.float64, expected torch\.float32"):
        silu_mul(randn(2, 8).double())
    with pytest.raises(ValueError, match="gate_up has last stride 2, expected 1"):
        silu_mul(randn(2, 16)[:, ::2])


def test_odd_width_is_refused(randn: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="width 7"):
        silu_mul(randn(2, 7))
