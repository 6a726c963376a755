"""Compares a kernel's result with its reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.frame.rows import Checked, Kernel

# The largest relative error ||actual - expected|| / ||expected|| of a whole tensor, and of any row. One rounding of the result to
# bf16 gives 1.7e-3, rounding attention weights too about twice that. tf32 instead of fp32 gives 3e-4.
_LIMITS = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 5e-3),
    torch.bfloat16: (6e-3, 2e-2),
    torch.float8_e4m3fn: (4e-2, 8e-2),  # three mantissa bits
}


def compared(
    kernel: Kernel, case: str, actual: torch.Tensor, expected: torch.Tensor, rounded_to: torch.dtype | None = None
) -> Iterator[Checked]:
    """Compare a tensor and its worst row (last dimension) with float64. Elements must be NaN until they are written.

    ``rounded_to``: the coarsest format used on the way, if it is not the result's.
    """
    overall, worst_row = _LIMITS[rounded_to or actual.dtype]
    difference, wide = actual.double() - expected, expected.double()
    yield Checked(kernel, case, float(difference.norm() / wide.norm()), overall)
    rows = difference.norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-30)
    # NaN counts as the largest error.
    yield Checked(kernel, f"{case}, worst row", float(rows.nan_to_num(nan=torch.inf).max()), worst_row)


def poisoned(shape: torch.Size | tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor for a result, NaN until it is written."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
