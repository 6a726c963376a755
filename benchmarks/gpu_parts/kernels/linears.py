"""A layer's products with 8-bit weights, compared with cuBLAS on the same weights in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from gpu_parts.frame.floors import linear_bytes
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding
from gpu_parts.kernels.paged import num_multiprocessors
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding, rounded
from kvrelay.kernels.attention.kv_scales import require_e4m3
from kvrelay.kernels.linear.weight_only import linear_splits, weight_only_linear

_STD = 0.02
_BUDGET_S = 0.15
_GOAL = Goal("≥ 1.5x of 16 bits", Against.PEER, 1 / 1.5)


def measure_linears(context: Context) -> Iterator[Finding]:
    """One row for each matrix, format and number of rows. The floor is the bytes with 8-bit weights."""
    stopwatch, generator, dtype = context.stopwatch(), context.generator(), compute_dtype(context)
    for name, shape in context.sizes.shape.linears.items():
        weights = {one: random_linear(context, generator, *shape, one) for one in roundings(context.device)}
        full = weights[Rounding.INT8].dequantised().to(dtype)
        num_splits = linear_splits(num_multiprocessors(context.device), *shape)
        for num_rows in context.sizes.linear_rows:
            x = torch.randn(num_rows, shape[1], device=context.device, generator=generator).to(dtype)
            full_s = stopwatch.median_s(lambda x=x, full=full: F.linear(x, full), budget_s=_BUDGET_S)  # type: ignore[misc]
            nbytes = linear_bytes(num_rows, *shape, 1)
            for rounding, weight in weights.items():
                seconds = stopwatch.median_s(
                    lambda x=x, one=weight, splits=num_splits: weight_only_linear(  # type: ignore[misc]
                        x, one.values, one.scale, None, splits
                    ),
                    budget_s=_BUDGET_S,
                )
                yield Row(
                    f"{rounding.value} {name}, {num_rows} rows",
                    Unit.SECONDS,
                    seconds,
                    None if context.limits is None else context.limits.bytes_s(nbytes),
                    (_GOAL,),
                    (Peer(f"cuBLAS, {str(dtype).removeprefix('torch.')}", full_s),),
                    f"{nbytes / seconds / 1e9:.0f} GB/s, cuBLAS {linear_bytes(num_rows, *shape, 2) / full_s / 1e9:.0f}; "
                    f"{num_splits} splits",
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
