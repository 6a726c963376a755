"""A layer's products of fp8 with fp8 for many rows, compared with dequantising the weight to 16 bits and cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from gpu_parts.frame.floors import linear_bytes
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.kernels.linears import compute_dtype, random_linear, roundings
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.kernels.linear.fp8 import fp8_linear, round_rows
from kvrelay.kernels.linear.weight_only import dequantise_weight

_BUDGET_S = 0.15
_GOAL = Goal("≤ 0.7 of 16 bits", Against.PEER, 0.7)  # what justifies the loss of precision


def measure_fp8_linears(context: Context) -> Iterator[Finding]:
    """One row for each matrix, with a scale per row and per output. The time includes rounding the rows."""
    if Rounding.FP8 not in roundings(context.device):
        yield Note("fp8 with fp8: this GPU has no e4m3")
        return
    stopwatch, generator, dtype = context.stopwatch(), context.generator(), compute_dtype(context)
    num_rows = context.sizes.fp8_rows
    for name, shape in context.sizes.shape.linears.items():
        weight = random_linear(context, generator, *shape, Rounding.FP8)
        values, scale = weight.values, weight.scale[:, None]
        x = torch.randn(num_rows, shape[1], device=context.device, generator=generator).to(dtype)

        def ours(x: torch.Tensor = x, values: torch.Tensor = values, scale: torch.Tensor = scale) -> torch.Tensor:
            rows = round_rows(x, x.shape[1], None)
            return fp8_linear(rows, values, scale, x.shape[1], None, 1)

        def theirs(
            x: torch.Tensor = x, values: torch.Tensor = values, scale: torch.Tensor = weight.scale
        ) -> torch.Tensor:
            return F.linear(x, dequantise_weight(values, scale, x.dtype))

        seconds = stopwatch.median_s(ours, budget_s=_BUDGET_S)
        yield Row(
            f"fp8 with fp8 {name}, {num_rows} rows",
            Unit.SECONDS,
            seconds,
            None if context.limits is None else context.limits.bytes_s(linear_bytes(num_rows, *shape, 1)),
            (_GOAL,),
            (Peer("dequantised, and cuBLAS", stopwatch.median_s(theirs, budget_s=_BUDGET_S)),),
            f"{2 * num_rows * shape[0] * shape[1] / seconds / 1e12:.1f} Tflop/s",
        )
