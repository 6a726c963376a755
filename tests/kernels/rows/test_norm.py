"""RMSNorm: rounding as in transformers, strided per-head views, the fused residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.rows.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (1, 100), (0, 64), (2, 5, 96)])
def test_rms_norm(randn: Randn, assert_close: AssertClose, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert_close(y, rms_norm_reference(x.double(), weight.double(), 1e-5))


def test_the_reference_is_transformers_norm(randn: Randn) -> None:
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight = randn(4, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    theirs = modeling_llama.LlamaRMSNorm(64, eps=1e-5).to(weight)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        assert torch.equal(rms_norm_reference(x, weight, 1e-5), theirs(x))


def test_strided_heads_of_a_fused_qkv(randn: Randn, assert_close: AssertClose) -> None:
    qkv, weight = randn(3, 9, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    before = qkv.clone()
    y = rms_norm(qkv[:, 2:7], weight, 1e-6)
    assert y.is_contiguous()
    assert_close(y, rms_norm_reference(qkv[:, 2:7].double(), weight.double(), 1e-6))
    assert torch.equal(qkv, before)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_keeps_the_rounded_sum(randn: Randn, assert_close: AssertClose, dtype: torch.dtype) -> None:
    x, residual, weight = randn(3, 72, dtype=dtype), randn(3, 72, dtype=dtype), randn(72, dtype=dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, weight, 1e-5)
    y = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert_close(y, expected)


def test_offsets_beyond_31_bits(device: str, randn: Randn) -> None:
    """Three rows are 2**30 elements apart, so the last starts at 2**31. Untouched pages take no memory."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((3, 64), (2**30, 1))
    near, weight = randn(3, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    far.copy_(near)
    assert torch.equal(rms_norm(far, weight, 1e-5), rms_norm(near, weight, 1e-5))
    assert torch.equal(add_rms_norm(near, far, weight, 1e-5), rms_norm(near + near, weight, 1e-5))
    assert torch.equal(far, near + near)


def test_wrong_arguments_are_refused(randn: Randn) -> None:
    x, weight = randn(2, 32), randn(32)
    with pytest.raises(ValueError, match=r"weight has shape \(31,\)"):
        rms_norm(x, weight[:31], 1e-5)
    with pytest.raises(ValueError, match="dtype"):
        rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(ValueError, match="x has 1 dimensions"):
        rms_norm(x[0], weight, 1e-5)
    with pytest.raises(ValueError, match="last stride"):
        rms_norm(randn(32, 32).T, weight, 1e-5)
    with pytest.raises(ValueError, match="residual has shape"):
        add_rms_norm(x, randn(3, 32), weight, 1e-5)
