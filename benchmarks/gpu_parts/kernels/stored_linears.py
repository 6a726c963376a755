"""A layer's products with 4-bit weights, compared with cuBLAS on the same weights in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.frame.floors import stored_itemsize
from gpu_parts.frame.rows import Against, Goal
from gpu_parts.frame.running import Context, Finding
from gpu_parts.kernels.linears import beside_cublas, compute_dtype
from gpu_parts.kernels.paged import num_multiprocessors
from kvrelay.engine.backends.cuda.linear import StoredLinear
from kvrelay.engine.weights.stored import StoredWeight

_STD = 0.02
_STD_OF_INTEGERS = 4.6  # of 0 to 15
_ZERO = 8  # of symmetric weights
_GOAL = Goal("≥ 1.7x of 16 bits", Against.PEER, 1 / 1.7)  # what the decode step needs


def measure_stored_linears(context: Context) -> Iterator[Finding]:
    """One row for each matrix and number of rows. The floor is the bytes of the numbers and scales."""
    stopwatch, generator, dtype = context.stopwatch(), context.generator(), compute_dtype(context)
    for name, shape in context.sizes.shape.linears.items():
        weight = random_stored(generator, *shape, context.sizes.group_size, dtype)
        full = weight.dequantised()
        linear = StoredLinear(weight, None, num_multiprocessors(context.device))
        itemsize = stored_itemsize(weight.group_size, dtype.itemsize)
        for num_rows in context.sizes.stored_rows:
            x = torch.randn(num_rows, shape[1], device=context.device, generator=generator).to(dtype)
            yield beside_cublas(context, stopwatch, f"4-bit {name}", linear, full, x, itemsize, _GOAL)


def random_stored(
    generator: torch.Generator, num_outs: int, num_ins: int, group_size: int, dtype: torch.dtype
) -> StoredWeight:
    """A symmetric matrix of random 4-bit numbers on the generator's device, as the engine keeps one of a checkpoint."""
    device, num_groups = generator.device, num_ins // group_size
    values = torch.randint(256, (num_outs, num_ins // 2), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand(num_outs, num_groups, device=device, generator=generator).add_(0.5)
    scale = scale.mul_(_STD / _STD_OF_INTEGERS).to(dtype)
    zero = torch.full((num_outs, num_groups), _ZERO, dtype=torch.uint8, device=device)
    return StoredWeight(values, scale, zero, group_size, order=None, dtype=dtype)
