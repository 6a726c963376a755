"""Checks products with 8-bit and 4-bit weights against float64 for every row tile, and the dequantised slabs for many rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.checks.comparing import compared
from gpu_parts.frame.rows import Kernel
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.kernels.linears import compute_dtype, random_linear, roundings
from gpu_parts.kernels.paged import num_multiprocessors
from gpu_parts.kernels.stored_linears import random_stored
from kvrelay.engine.backends.cuda.linear import FullLinear, RoundedLinear, StoredLinear
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.kernels.linear.fp8 import fp8_linear, fp8_linear_reference, round_rows
from kvrelay.kernels.linear.weight_only import dequantise_weight, linear_splits

_ROWS = (1, 16, 17, 33, 64, 129)
_MANY_ROWS = 300  # more rows than the kernel takes


def check_linear(context: Context) -> Iterator[Finding]:
    """Multiply as the engine does: one row in 16 bits, then rounded weights with splits for this device; with a bias."""
    generator, dtype = context.generator(), compute_dtype(context)
    shapes = context.sizes.shape.linears
    for name, shape in shapes.items():
        full = (torch.randn(shape, device=context.device, generator=generator) * shape[1] ** -0.5).to(dtype)
        x, bias = (torch.randn(1, n, device=context.device, generator=generator).to(dtype) for n in reversed(shape))
        expected = x.double() @ full.double().T + bias.double()
        yield from compared(Kernel.LINEAR, f"{name}, 1 row", FullLinear(full, bias[0])(x), expected)
    for rounding in roundings(context.device):
        # QKV has split inputs on a GPU; down has the longest sums.
        for name in ("QKV", "down"):
            weight = random_linear(context, generator, *shapes[name], rounding)
            bias = torch.randn(weight.shape[0], device=context.device, generator=generator).to(dtype)
            linear = RoundedLinear(weight, bias, num_multiprocessors(context.device))
            exact = weight.values.double() * weight.scale.double()[:, None]
            rows = _ROWS[:3] if context.is_dry else (*_ROWS, _MANY_ROWS)
            x = torch.randn(max(rows), weight.shape[1], device=context.device, generator=generator).to(dtype)
            expected = x.double() @ exact.T + bias.double()
            for num_rows in rows:
                case = f"{rounding.value} {name}, {num_rows} rows"
                yield from compared(Kernel.LINEAR, case, linear(x[:num_rows]), expected[:num_rows])
        slab = dequantise_weight(weight.values, weight.scale, dtype)
        yield from compared(Kernel.LINEAR, f"{rounding.value} slab", slab, exact)


def check_stored_linear(context: Context) -> Iterator[Finding]:
    """Multiply with 4-bit weights as the engine does. The weights are rounded once to 16 bits, so they are exact here."""
    generator, dtype = context.generator(), compute_dtype(context)
    for name in ("QKV", "down"):
        weight = random_stored(generator, *context.sizes.shape.linears[name], context.sizes.group_size, dtype)
        linear = StoredLinear(weight, None, num_multiprocessors(context.device))
        exact = weight.dequantised().double()
        rows = _ROWS[:3] if context.is_dry else (*_ROWS, _MANY_ROWS)
        x = torch.randn(max(rows), weight.shape[1], device=context.device, generator=generator).to(dtype)
        expected = x.double() @ exact.T
        for num_rows in rows:
            case = f"4-bit {name}, {num_rows} rows"
            yield from compared(Kernel.STORED_LINEAR, case, linear(x[:num_rows]), expected[:num_rows])


def check_fp8_linear(context: Context) -> Iterator[Finding]:
    """Multiply fp8 with fp8 as the engine does: rounded rows, with a scale per row and per group of 128 inputs."""
    if Rounding.FP8 not in roundings(context.device):
        yield Note("fp8 with fp8: this GPU has no e4m3")
        return
    generator, dtype = context.generator(), compute_dtype(context)
    weight = random_linear(context, generator, *context.sizes.shape.linears["down"], Rounding.FP8)
    num_outs, num_ins = weight.shape
    splits = linear_splits(num_multiprocessors(context.device), num_outs, num_ins)
    for num_rows in _ROWS[:3] if context.is_dry else (*_ROWS, _MANY_ROWS):
        x = torch.randn(num_rows, num_ins, device=context.device, generator=generator).to(dtype)
        for size in (num_ins, 128):
            scale = weight.scale[:, None].expand(num_outs, -(-num_ins // size)).contiguous()
            rows = round_rows(x, size, None)
            product = fp8_linear(rows, weight.values, scale, size, None, splits if num_rows < _MANY_ROWS else 1)
            expected = fp8_linear_reference(rows, weight.values, scale, size, None)
            yield from compared(Kernel.FP8_LINEAR, f"{num_rows} rows by {size}", product, expected)
