"""The device's best rates: memory bandwidth, matrix products, copies to the host and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.frame.floors import Limits
from gpu_parts.frame.rows import Row, Unit
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.frame.timing import device_name


def measure_limits(context: Context) -> Iterator[Finding]:
    """Measure all of them on random numbers, because zeros are faster."""
    sizes, device = context.sizes, context.device
    stopwatch, generator = context.stopwatch(), context.generator()
    yield Note(f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    source = torch.randn(sizes.copy_bytes // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    copy_s = stopwatch.median_s(lambda: target.copy_(source))
    host = torch.empty(source.numel() // 4, pin_memory=device.type == "cuda")
    part = source[: host.numel()]
    to_host_s = stopwatch.median_s(lambda: host.copy_(part, non_blocking=True))
    to_device_s = stopwatch.median_s(lambda: part.copy_(host, non_blocking=True))
    size = sizes.matmul_size
    left, right = (torch.randn(size, size, device=device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    matmul_s = stopwatch.median_s(lambda: torch.matmul(left, right, out=product), budget_s=1.0)
    limits = Limits(
        copy_bytes_per_s=2 * sizes.copy_bytes / copy_s,
        matmul_flops_per_s=2 * size**3 / matmul_s,
        to_host_bytes_per_s=host.nbytes / to_host_s,
        to_device_bytes_per_s=host.nbytes / to_device_s,
    )
    yield limits
    yield Row("limit: device copy, read and written", Unit.BYTES_PER_S, limits.copy_bytes_per_s)
    yield Row(f"limit: bf16 product, {size} x {size} x {size}", Unit.FLOPS_PER_S, limits.matmul_flops_per_s)
    yield Row("limit: device to pinned memory", Unit.BYTES_PER_S, limits.to_host_bytes_per_s)
    yield Row("limit: pinned memory to device", Unit.BYTES_PER_S, limits.to_device_bytes_per_s)
