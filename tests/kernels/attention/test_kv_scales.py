"""Quantising to e4m3 and back, and the refusal of unsuitable devices and scales."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.attention.kv_scales import dequantise, quantise, require_compute_dtype, require_e4m3
from kvrelay.kernels.checks import FP8_DTYPE


def test_there_and_back_within_the_rounding_of_three_bits() -> None:
    values = torch.linspace(-3, 3, 2 * 3 * 8).view(2, 3, 8)  # [tokens, heads, head_dim]
    scales = torch.tensor([[0.01, 0.5, 1.0], [0.02, 0.25, 2.0]])
    for kind in (0, 1):
        stored = quantise(values, scales[kind])
        assert stored.dtype == FP8_DTYPE
        back = dequantise(stored.transpose(0, 1), scales, kind).transpose(0, 1)
        torch.testing.assert_close(back, values, rtol=2**-4, atol=2**-10)


def test_what_is_too_large_saturates() -> None:
    stored = quantise(torch.tensor([[[1e9, -1e9, 449.0, 464.1]]]), torch.ones(1))
    assert stored.float().tolist() == [[[448.0, -448.0, 448.0, 448.0]]]


def test_other_types_pass_as_they_are() -> None:
    values = torch.randn(1, 2, 4, dtype=torch.float64)
    assert dequantise(values, None, 0) is values


def test_scales_go_with_fp8_pools_only() -> None:
    pool, scales = torch.zeros(2, 3, 2, 4, 8, 16), torch.ones(3, 2, 4)
    require_compute_dtype(pool, None, q=torch.zeros(1))
    require_compute_dtype(pool.to(FP8_DTYPE), scales, q=torch.zeros(1, dtype=torch.bfloat16))
    for other, given, message in (
        (pool, scales, "kv_scales is given for a pool of torch.float32"),
        (pool.to(FP8_DTYPE), None, "kv_scales is None for a pool of torch.float8_e4m3fn"),
        (pool.to(FP8_DTYPE), scales[:2], r"kv_scales has shape \(2, 2, 4\), expected \[3, 2, 4\]"),
        (pool.to(FP8_DTYPE), scales.half(), "kv_scales has dtype torch.float16"),
        (pool.to(FP8_DTYPE), torch.ones(3, 4, 2).transpose(1, 2), "kv_scales has strides"),
    ):
        with pytest.raises(ValueError, match=message):
            require_compute_dtype(other, given)
    with pytest.raises(ValueError, match=r"q has dtype torch\.float8_e4m3fn"):
        require_compute_dtype(pool.to(FP8_DTYPE), scales, q=pool.to(FP8_DTYPE))


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_devices_without_the_type_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    require_e4m3(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if not is_refused:
        require_e4m3(torch.device("cuda"))
        return
    with pytest.raises(ValueError, match=r"compute capability 8.9 or later, this one has 8.0; keep the KV pool"):
        require_e4m3(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^fp8 weights need an NVIDIA GPU of .*, this one has 8.0; take int8$"):
        require_e4m3(torch.device("cuda"), "fp8 weights need", "take int8")
