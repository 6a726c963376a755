"""Products of one row with a weight in 16, 8 or 4 bits, without tensor cores: what one stream's decode step consists of.

Such a product is bound by the bytes of the weight. A program streams `outs` rows of it, 16 bytes per lane and row at a time, with
the loads of several steps under way. A lane multiplies its piece of each row with the same piece of `x` and adds the products in
fp32. Lanes are added at the end, in a fixed order. The inputs are not split, so one kernel does it all, and equal calls give equal
bits.

Integers are not converted, which is slow on GPUs. Their bits become the mantissa of an fp32 number that is larger than the integer
by a constant, as FasterTransformer does in fp16. The excess times `x` is subtracted from each piece's sum. A piece lies in one
group, whose zero and scale are applied to that sum. So, unlike in `group_scaled_linear`, no weight is rounded to the dtype of `x`.

Not for more rows: they are multiplied on tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import FP8_DTYPE, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.linear.group_scaled import check_integers
from kvrelay.kernels.linear.weight_only import COMPUTE_DTYPES, check_weight

PIECE_BYTES = 16  # what a lane loads at once
_MAX_PIECE = 32  # numbers of 4 bits in a piece
# cuBLAS reads larger matrices, such as heads, as fast as memory goes, and smaller ones have too few rows for our programs.
_MAX_FULL_NUMBERS = 2**27
_MIN_FULL_OUTS = 1024


@dataclass(frozen=True)
class VectorTile:
    """The part of a weight that a program reads in a step of the loop."""

    outs: int  # rows
    warps: int  # beside each other along the inputs
    stages: int  # steps whose loads are under way; 1 for one at a time, in registers


def vector_tile(out_features: int, bits: int) -> VectorTile:
    """The tile for a matrix with numbers of `bits` bits: the fastest of a dozen on an H200. Matrices with few rows have more warps.

    Unpacking 4 bits takes nearly as long as loading them, so there more rows share what is done for `x`, where there are enough.
    """
    is_large, is_small = out_features >= 16384, out_features < 4096
    if bits == 4:
        if is_small:
            return VectorTile(outs=4, warps=2, stages=1)
        return VectorTile(outs=8, warps=1, stages=3) if is_large else VectorTile(outs=8, warps=2, stages=1)
    return VectorTile(outs=4, warps=4 if is_small or (is_large and bits == 16) else 1, stages=4)


def is_vector_product(in_features: int) -> bool:
    """Whether `vector_rounded_linear` and `vector_stored_linear` take a weight with so many inputs: in whole pieces."""
    return in_features % _MAX_PIECE == 0


def is_full_vector_product(out_features: int, in_features: int) -> bool:
    """Whether `vector_linear` is meant to multiply one row with a matrix of 16 bits, rather than cuBLAS."""
    is_of_size = out_features >= _MIN_FULL_OUTS and out_features * in_features <= _MAX_FULL_NUMBERS
    return is_vector_product(in_features) and is_of_size


def vector_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` in float64, for any of the formats, dequantised."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@triton.jit
@no_type_check
def widened(weight):
    """Stored numbers in fp32. An e4m3 number is an fp16 number, too."""
    if weight.dtype == tl.float8e4nv:
        weight = weight.to(tl.float16)
    return weight.to(tl.float32)


@triton.jit
@no_type_check
def finished(total, rows, present, scale_ptr, bias_ptr):
    """Sums with the scales and biases of their rows of the weight; either pointer may be None."""
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + rows, mask=present, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=present, other=0.0).to(tl.float32)
    return total


@triton.jit
@no_type_check
def _shifted_numbers(stored, nothing, BITS: tl.constexpr, OUTS: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr):
    """`[OUTS, LANES * 4]` words as `[OUTS, LANES, PIECE]` numbers in fp32, plus the excess that `_piece_sums` knows.

    `nothing` is 0, and the compiler must not know that: it merges a mask and an addition only if one of the two is in a register.
    """
    if BITS == 8:
        stored = stored ^ -2139062144  # 0x80808080: from -128..127 to 0..255
    byte = tl.arange(0, 4)
    # Moves each byte to the upper half of the mantissa. One of the two shifts is by 0, and both are constants.
    words = tl.reshape(stored, (OUTS, LANES, 4, 1))
    words = (words << tl.maximum(15 - 8 * byte, 0)) >> tl.maximum(8 * byte - 15, 0)
    low = nothing + 0x43800000
    if BITS == 8:
        words = words & 0x7F8000 | low  # 256 + number
    else:
        half = tl.arange(0, 2)
        words = tl.reshape(words, (OUTS, LANES, 4, 4, 1))
        # The low half becomes 256 + number, the high half 16 + number.
        words = words & tl.where(half == 0, 0x78000, 0x780000) | tl.where(half == 0, low, nothing + 0x41800000)
    return tl.reshape(words.to(tl.float32, bitcast=True), (OUTS, LANES, PIECE))


@triton.jit
@no_type_check
def _piece_sums(x, BITS: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr):
    """The sums of pieces `[1, LANES]`, and by how much those of `x * _shifted_numbers` are too large."""
    if BITS == 8:
        sums = tl.sum(x, 2)
        return sums, sums * 384.0
    halves = tl.sum(tl.reshape(x, (1, LANES, PIECE // 2, 2)), 2)
    return tl.sum(halves, 2), tl.sum(halves * tl.where(tl.arange(0, 2) == 0, 256.0, 16.0), 2)


@triton.jit
@no_type_check
def _vector_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    in_features,
    num_columns,
    weight_stride_out,
    num_groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`weight_ptr` has floats, or words of integers of `BITS` bits. A piece is `PIECE` numbers in `COLUMNS` elements.

    `GROUP` is None if an output has one scale.
    """
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    has_out = outs < out_features
    # Rows past the last one repeat it and are never stored.
    rows = tl.minimum(outs, out_features - 1).to(tl.int64)
    lanes, ins, columns = tl.arange(0, LANES), tl.arange(0, LANES * PIECE), tl.arange(0, LANES * COLUMNS)
    weight_ptrs = weight_ptr + rows[:, None] * weight_stride_out + columns[None, :]
    in_features, num_columns = tl.multiple_of(in_features, PIECE), tl.multiple_of(num_columns, COLUMNS)
    nothing = in_features >> 31
    acc = tl.zeros([OUTS, LANES], tl.float32)
    sums = tl.zeros([1, LANES], tl.float32)
    for column in tl.range(0, num_columns, LANES * COLUMNS, num_stages=STAGES):
        start = column // COLUMNS * PIECE
        if GROUP is not None:
            places = rows[:, None] * num_groups + ((start + lanes * PIECE) // GROUP)[None, :]
            present = (start + lanes * PIECE < in_features)[None, :]
            scale = tl.load(scale_ptr + places, mask=present, other=0.0)
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + places, mask=present, other=0)
        # Loaded before the weight: so the compiler moves x between lanes, and leaves the weight where it was loaded.
        x = tl.load(x_ptr + start + ins, mask=start + ins < in_features, other=0.0)
        stored = tl.load(weight_ptrs + column, mask=(column + columns < num_columns)[None, :], other=0.0)
        x = tl.reshape(x, (1, LANES, PIECE)).to(tl.float32)
        if BITS is None:
            part = tl.sum(widened(tl.reshape(stored, (OUTS, LANES, PIECE))) * x, 2)
        else:
            sum_x, excess = _piece_sums(x, BITS, LANES, PIECE)
            part = tl.sum(_shifted_numbers(stored, nothing, BITS, OUTS, LANES, PIECE) * x, 2) - excess
        if GROUP is not None:
            if zero_ptr is not None:
                part -= zero.to(tl.float32) * sum_x
            part *= scale.to(tl.float32)
        elif zero_ptr is not None:
            sums += sum_x
        acc += part
    total = tl.sum(acc, 1)
    if GROUP is None and zero_ptr is not None:
        total -= tl.load(zero_ptr + rows).to(tl.float32) * tl.sum(sums)
    total = finished(total, rows, has_out, scale_ptr if GROUP is None else None, bias_ptr)
    tl.store(out_ptr + outs, total.to(out_ptr.dtype.element_ty), mask=has_out)


def vector_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`, without gradients.

    Args:
        x: `[1, in_features]` fp16/bf16, last stride 1; `is_vector_product` must hold for `in_features`.
        weight: `[out_features, in_features]` in the dtype of `x`, last stride 1.
        bias: `[out_features]` in the dtype of `x`, contiguous, or None. Added before the only rounding.

    Returns:
        A new tensor `[1, out_features]` in the dtype of `x`.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    require_shape("weight", weight, ("out_features", "in_features"))
    require_dtype("weight", weight, x.dtype)
    require_unit_stride("weight", weight)
    return _multiply(x, weight, None, None, None, bias)


def vector_rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ (weight * scale).T + bias` for one row; for `weight` and `scale` see `weight_only_linear`, else `vector_linear`.

    Rows of int8 weights begin at multiples of 4 bytes.
    """
    check_weight(weight, scale)
    return _multiply(x, weight, scale, None, None, bias)


def vector_stored_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`x @ ((values - zero) * scale).T + bias` for one row; see `group_scaled_linear` for the weight, else `vector_linear`.

    Rows of integers begin at multiples of 4 bytes.
    """
    check_integers(values, scale, zero, group_size)
    return _multiply(x, values, scale, zero, group_size if scale.shape[1] > 1 else None, bias)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    group_size: int | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Check what all formats have in common, and launch the kernel. `group_size` is None for one scale per output."""
    in_features = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    require_shape("x", x, (1, in_features))
    require_dtype("x", x, *COMPUTE_DTYPES)
    require_unit_stride("x", x)
    if not is_vector_product(in_features):
        raise ValueError(f"x has {in_features} features, expected a multiple of {_MAX_PIECE}")
    out_features = weight.shape[0]
    if bias is not None:
        require_shape("bias", bias, (out_features,))
        require_dtype("bias", bias, x.dtype)
        require_unit_stride("bias", bias)
    bits = {torch.uint8: 4, torch.int8: 8, FP8_DTYPE: 8}.get(weight.dtype, 16)
    is_integer = weight.dtype in (torch.uint8, torch.int8)
    if is_integer:
        weight = weight.view(torch.int32)
    tile = vector_tile(out_features, bits)
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    _vector_linear_kernel[(triton.cdiv(out_features, tile.outs),)](
        x,
        weight,
        scale,
        zero,
        bias,
        out,
        out_features,
        in_features,
        weight.shape[1],
        weight.stride(0),
        1 if scale is None else scale.numel() // out_features,
        GROUP=group_size,
        BITS=bits if is_integer else None,
        PIECE=PIECE_BYTES * 8 // bits,
        COLUMNS=PIECE_BYTES // weight.element_size(),
        OUTS=tile.outs,
        LANES=32 * tile.warps,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
