"""A layer's products of one row, and with 8-bit weights, compared with cuBLAS on the same weights in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from gpu_parts.frame.floors import linear_bytes
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding
from gpu_parts.frame.timing import Stopwatch
from gpu_parts.kernels.paged import num_multiprocessors
from kvrelay.engine.backends.cuda.linear import FullLinear, RoundedLinear
from kvrelay.engine.models.ops import Linear
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding, rounded
from kvrelay.kernels.attention.kv_scales import require_e4m3

_STD = 0.02
_BUDGET_S = 0.15
_FULL_GOAL = Goal("≥ 1x of cuBLAS", Against.PEER, 1.0)
_GOAL = Goal("≥ 1.5x of 16 bits", Against.PEER, 1 / 1.5)


def measure_linears(context: Context) -> Iterator[Finding]:
    """Figures of each matrix: one row with full weights, then each 8-bit format and number of rows. Floors are the bytes."""
    stopwatch, generator, dtype = context.stopwatch(), context.generator(), compute_dtype(context)
    for name, shape in context.sizes.shape.linears.items():
        weights = {one: random_linear(context, generator, *shape, one) for one in roundings(context.device)}
        full = weights[Rounding.INT8].dequantised().to(dtype)
        row = torch.randn(1, shape[1], device=context.device, generator=generator).to(dtype)
        full_name = f"{str(dtype).removeprefix('torch.')} {name}"
        yield beside_cublas(context, stopwatch, full_name, FullLinear(full, None), full, row, 2, _FULL_GOAL)
        for num_rows in context.sizes.linear_rows:
            x = torch.randn(num_rows, shape[1], device=context.device, generator=generator).to(dtype)
            for rounding, weight in weights.items():
                linear = RoundedLinear(weight, None, num_multiprocessors(context.device))
                yield beside_cublas(context, stopwatch, f"{rounding.value} {name}", linear, full, x, 1, _GOAL)


def beside_cublas(
    context: Context,
    stopwatch: Stopwatch,
    name: str,
    linear: Linear,
    full: torch.Tensor,
    x: torch.Tensor,
    itemsize: float,
    goal: Goal,
) -> Row:
    """The time of the engine's ``linear`` for the rows ``x``, and of cuBLAS with the same weight in 16 bits, ``full``.

    ``itemsize``: bytes of a number of the engine's weight.
    """
    num_rows, (num_outs, num_ins) = len(x), full.shape
    seconds = stopwatch.median_s(lambda: linear(x), budget_s=_BUDGET_S)
    full_s = stopwatch.median_s(lambda: F.linear(x, full), budget_s=_BUDGET_S)
    nbytes, full_nbytes = (linear_bytes(num_rows, num_outs, num_ins, size) for size in (itemsize, 2))
    return Row(
        f"{name}, {num_rows} rows",
        Unit.SECONDS,
        seconds,
        None if context.limits is None else context.limits.bytes_s(nbytes),
        (goal,),
        (Peer(f"cuBLAS, {str(x.dtype).removeprefix('torch.')}", full_s),),
        f"{nbytes / seconds / 1e9:.0f} GB/s, cuBLAS {full_nbytes / full_s / 1e9:.0f}",
    )


def roundings(device: torch.device) -> Sequence[Rounding]:
    """The formats that the device supports: all, or only int8."""
    try:
        require_e4m3(device)
    except ValueError:
        return (Rounding.INT8,)
    return tuple(Rounding)


def compute_dtype(context: Context) -> torch.dtype:
    """The model's dtype, or fp16 in a dry run, whose model is fp32."""
    return context.dtype if context.dtype in (torch.bfloat16, torch.float16) else torch.float16


def random_linear(
    context: Context, generator: torch.Generator, num_outs: int, num_ins: int, rounding: Rounding
) -> RoundedWeight:
    """A rounded matrix of random weights."""
    weight = torch.randn(num_outs, num_ins, device=context.device, generator=generator) * _STD
    return rounded(weight.to(compute_dtype(context)), rounding)
