"""How far a kernel's result may lie from its reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.frame.rows import Checked, Kernel

# The largest relative error ||actual - expected|| / ||expected|| of a whole tensor, and of any of its rows. Rounding the result
# once to bf16 makes 1.7e-3, rounding the weights of attention, too, about twice that; tf32 where fp32 is due makes 3e-4.
_LIMITS = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 5e-3),
    torch.bfloat16: (6e-3, 2e-2),
    torch.float8_e4m3fn: (4e-2, 8e-2),  # three bits behind the point
}


def compared(
    kernel: Kernel, case: str, actual: torch.Tensor, expected: torch.Tensor, rounded_to: torch.dtype | None = None
) -> Iterator[Checked]:
    """A whole tensor and the worst of its rows (its last dimension) against float64. What was not written must be NaN before.

    ``rounded_to``: the coarsest format on the way, if that is not the result's own.
    """
    overall, worst_row = _LIMITS[rounded_to or actual.dtype]
    difference, wide = actual.double() - expected, expected.double()
    yield Checked(kernel, case, float(difference.norm() / wide.norm()), overall)
    rows = difference.norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-30)
    # NaN would pass as small: it is the largest of errors.
    yield Checked(kernel, f"{case}, worst row", float(rows.nan_to_num(nan=torch.inf).max()), worst_row)


def poisoned(shape: torch.Size | tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Where a result goes: NaN until it is written."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
