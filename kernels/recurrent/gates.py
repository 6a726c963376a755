"""What several recurrences compute of a token's gates."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def softplus(x):
    """log(1 + exp(x)) of fp32 numbers, without an overflow, and with all digits where it is small."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small - 0.5 * small * small, tl.log(1.0 + small))
