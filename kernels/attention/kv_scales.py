"""The scales of an fp8 (e4m3) KV pool: the pool stores value / scale, and readers multiply by the scale.

There is one fp32 scale per layer, for keys and for values, and per KV head: `kv_scales [num_layers, 2, num_kv_heads]`, index 0 of
the second dimension for keys. A pool of another type has none. The caller owns the scales (from the checkpoint, or 1) and passes
the same ones to every kernel; they are not part of the pool.
"""

from __future__ import annotations

import torch

from kvrelay.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, PagedKv, require_dtype, require_shape

# The largest finite number of e4m3; conversion of a larger one saturates.
FP8_MAX = 448.0


def require_compute_dtype(
    pool: torch.Tensor | PagedKv, kv_scales: torch.Tensor | None, **tensors: torch.Tensor
) -> None:
    """Check the dtype of `tensors` (by their names in messages), and that exactly an fp8 pool has scales.

    Raises:
        ValueError: a tensor is not of the pool's dtype (of no float type, if the pool is fp8); scales are
            missing, not wanted, or of another shape or dtype.
    """
    is_fp8 = pool.dtype == FP8_DTYPE
    for name, tensor in tensors.items():
        require_dtype(name, tensor, *(FLOAT_DTYPES if is_fp8 else (pool.dtype,)))
    if is_fp8 != (kv_scales is not None):
        raise ValueError(f"kv_scales is {'given' if kv_scales is not None else 'None'} for a pool of {pool.dtype}")
    if kv_scales is not None:
        keys = PagedKv.of(pool).keys
        require_shape("kv_scales", kv_scales, (keys.shape[1], 2, keys.shape[2]))
        require_dtype("kv_scales", kv_scales, torch.float32)
        if not kv_scales.is_contiguous():
            raise ValueError(f"kv_scales has strides {kv_scales.stride()}, expected a contiguous tensor")


def require_e4m3(
    device: torch.device,
    what_needs: str = "an fp8 (e4m3) KV pool needs",
    way_out: str = "keep the KV pool in the model's type",
) -> None:
    """Raise ValueError unless the kernels can convert e4m3 on `device`. An interpreter on a CPU can.

    `what_needs` and `way_out` are the begin and the end of the message.
    """
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    # gfx942's fp8 has another bias, so e4m3 would be emulated.
    if torch.version.hip is not None or (major, minor) < (8, 9):
        raise ValueError(
            f"{what_needs} an NVIDIA GPU of compute capability 8.9 or later, this one has {major}.{minor}; {way_out}"
        )


def dequantise(values: torch.Tensor, scales: torch.Tensor | None, kind: int) -> torch.Tensor:
    """The values `[num_kv_heads, n, head_dim]` before `quantise`, except for its rounding, in at least fp32.

    `scales`: of one layer, or None without scales. `kind`: 0 for keys, 1 for values.
    """
    wide = values.to(torch.float32) if values.dtype == FP8_DTYPE else values
    return wide if scales is None else wide * scales[kind][:, None, None]


def quantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values `[..., num_kv_heads, head_dim]` divided by their heads' scales, saturated, as e4m3."""
    return (values.to(torch.float32) / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
