"""The products of adapters (LoRA), all adapters of a step in two launches: `out += scaling * (x A.T) B.T`, row by row.

*Shrink* multiplies rows with their adapters' A. *Expand* multiplies the results with B and adds them. The caller sorts rows by
adapter into tiles of one adapter each; a program takes a tile. Rows without an adapter are in no tile and cost nothing. Matrices
stay where they were loaded, each with its own rank: a table on the device has their addresses. So one launch, and one CUDA graph,
also serves adapters that are loaded later. A product may have several linear layers side by side (q, k and v): the *parts* of a
site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.kernels.checks import FLOAT_DTYPES, require_dtype, require_shape, require_unit_stride

_ALIGNMENT = 16  # numbers; rows of matrices are padded to multiples, so that they can be loaded 16 bytes at a time
_FIELDS = 5  # fields of a table's entry: address of A, address of B, rank, first column, columns
_MAX_SPLITS, _SPLIT_INS = 8, 512  # a shrink has one split per so many inputs, up to the maximum


@dataclass(frozen=True)
class Tiling:
    """The sizes of both kernels' programs, and of their steps."""

    rows: int  # rows of a tile
    ranks: int
    shrink_ins: int
    expand_outs: int
    stages: int
    shrink_warps: int
    expand_warps: int
    is_split: bool  # split the inputs: there are few programs with long rows


FEW_ROWS = Tiling(16, 16, 128, 128, stages=4, shrink_warps=2, expand_warps=4, is_split=True)
MANY_ROWS = Tiling(64, 32, 64, 128, stages=3, shrink_warps=4, expand_warps=4, is_split=False)
FP32_ROWS = Tiling(16, 16, 32, 64, stages=2, shrink_warps=4, expand_warps=4, is_split=False)


@dataclass(frozen=True)
class AdaptedRows:
    """A step's rows by adapter. Tiles with slot 0 are empty, so a CUDA graph can have the largest number of tiles."""

    tiling: Tiling
    rows: torch.Tensor  # [num_places] int64, rows of x and out, sorted by adapter
    tiles: torch.Tensor  # [num_tiles, 3] int32: slot, first place, number of places


class LowRankTable:
    """The matrices of all slots for one site. Slots count from 1."""

    def __init__(
        self,
        num_slots: int,
        num_inputs: int,
        widths: Sequence[int],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`widths`: the outputs of each part, which are side by side."""
        self.dtype = dtype
        self.num_inputs = num_inputs
        self.widths = tuple(widths)
        self.max_rank = max_rank
        self.entries = torch.zeros((num_slots + 1, len(widths), _FIELDS), dtype=torch.int64, device=device)
        self.scalings = torch.zeros((num_slots + 1, len(widths)), dtype=torch.float32, device=device)
        # Keeps the tensors alive whose addresses are in the entries.
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_aligned(self) -> bool:
        """Whether every part begins and ends at a multiple of 16 columns."""
        return not any(width % _ALIGNMENT for width in self.widths)

    def put(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Keep `a` `[rank, inputs]` and `b` `[width, rank]` in the kernels' layout: both `[rank, …]`, rows padded.

        Raises:
            ValueError: wrong shape, dtype or rank.
        """
        require_shape("a", a, ("rank", self.num_inputs))
        require_shape("b", b, (self.widths[part], len(a)))
        for name, tensor in (("a", a), ("b", b)):
            require_dtype(name, tensor, self.dtype)
        if len(a) > self.max_rank:
            raise ValueError(f"rank is {len(a)}, expected at most {self.max_rank}")
        there = tuple(F.pad(one, (0, -one.shape[1] % _ALIGNMENT)).contiguous() for one in (a, b.T))
        self._kept[slot, part] = there[0], there[1]
        entry = (there[0].data_ptr(), there[1].data_ptr(), len(a), sum(self.widths[:part]), self.widths[part])
        # Number by number, because a copy from the host would wait for all launched steps.
        for field, number in enumerate(entry):
            self.entries[slot, part, field].fill_(number)
        self.scalings[slot, part].fill_(scaling)

    def drop(self, slot: int) -> None:
        """Forget a slot's matrices. No later launch may use the slot."""
        self.entries[slot] = 0
        for part in range(len(self.widths)):
            self._kept.pop((slot, part), None)


def add_low_rank_reference(
    x: torch.Tensor,
    out: torch.Tensor,
    adapters: Mapping[int, Sequence[tuple[int, torch.Tensor, torch.Tensor, float]]],
    slots: Sequence[int],
) -> None:
    """The same, row by row, in fp32 (in fp64 if `out` is).

    `adapters`: by slot, (first column, A, B, scaling) for each part. `slots`: of each row, 0 for none.
    """
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    for row, slot in enumerate(slots):
        for start, a, b, scaling in adapters.get(slot, ()):
            lowered = a.to(wide) @ x[row].to(wide) * scaling
            columns = out[row, start : start + len(b)]
            columns += (b.to(wide) @ lowered).to(out.dtype)


@triton.jit
@no_type_check
def _shrink_kernel(
    x_ptr,
    entries_ptr,
    scalings_ptr,
    rows_ptr,
    tiles_ptr,
    lowered_ptr,
    num_parts,
    in_features,
    x_stride_row,
    a_stride_rank,
    lowered_stride_split,
    lowered_stride_place,
    lowered_stride_part,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    slot = tl.load(tile_ptr)
    if slot > 0:
        split = tl.program_id(1) % SPLITS
        part = tl.program_id(1) // SPLITS
        entry = slot * num_parts + part
        rank = tl.load(entries_ptr + entry * FIELDS + 2).to(tl.int32)
        scaling = tl.load(scalings_ptr + entry)
        a_ptr = tl.multiple_of(tl.load(entries_ptr + entry * FIELDS).to(x_ptr.dtype), 16)
        places = tl.arange(0, ROWS)
        has_row = places < tl.load(tile_ptr + 2)
        places += tl.load(tile_ptr + 1)
        # Places past the tile's last one multiply some row and store nothing, so the loop needs no mask.
        rows = tl.load(rows_ptr + places, mask=has_row, other=0)
        ins = tl.arange(0, INS)
        x_ptrs = x_ptr + rows[:, None] * x_stride_row + ins[None, :]
        split_ins = tl.cdiv(tl.cdiv(in_features, INS), SPLITS) * INS
        first_in = split * split_ins
        for first_rank in range(0, rank, RANKS):
            ranks = first_rank + tl.arange(0, RANKS)
            has_rank = ranks < rank
            a_ptrs = a_ptr + ranks[:, None] * a_stride_rank + ins[None, :]
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            for at in range(first_in, tl.minimum(first_in + split_ins, in_features), INS):
                present = at + ins < in_features
                x = tl.load(x_ptrs + at, mask=present[None, :], other=0.0)
                a = tl.load(a_ptrs + at, mask=has_rank[:, None] & present[None, :], other=0.0)
                acc = tl.dot(x, a.T, acc, input_precision="ieee")
            lowered_ptrs = (
                lowered_ptr
                + split.to(tl.int64) * lowered_stride_split
                + part * lowered_stride_part
                + places.to(tl.int64)[:, None] * lowered_stride_place
                + ranks[None, :]
            )
            # The padding after the rank is zeros, which expand also reads: with a mask it would load number by number.
            tl.store(lowered_ptrs, acc * scaling, mask=has_row[:, None])


@triton.jit
@no_type_check
def _expand_kernel(
    lowered_ptr,
    entries_ptr,
    rows_ptr,
    tiles_ptr,
    out_ptr,
    num_parts,
    out_features,
    out_stride_row,
    lowered_stride_split,
    lowered_stride_place,
    lowered_stride_part,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    slot = tl.load(tile_ptr)
    if slot > 0:
        places = tl.arange(0, ROWS)
        has_row = places < tl.load(tile_ptr + 2)
        places += tl.load(tile_ptr + 1)
        first_out = tl.program_id(1) * OUTS
        outs = first_out + tl.arange(0, OUTS)
        acc = tl.zeros([ROWS, OUTS], tl.float32)
        sum_of_ranks = 0
        for part in range(num_parts):
            entry_ptr = entries_ptr + (slot * num_parts + part) * FIELDS
            start = tl.load(entry_ptr + 3).to(tl.int32)
            width = tl.load(entry_ptr + 4).to(tl.int32)
            if IS_ALIGNED:
                start = tl.multiple_of(start, 16)
                width = tl.multiple_of(width, 16)
            # A part without columns in this tile adds nothing.
            is_here = (start < first_out + OUTS) & (first_out < start + width)
            rank = tl.where(is_here, tl.load(entry_ptr + 2).to(tl.int32), 0)
            sum_of_ranks += rank
            b_ptr = tl.multiple_of(tl.load(entry_ptr + 1).to(out_ptr.dtype), 16)
            b_stride_rank = tl.cdiv(width, 16) * 16
            has_out = (outs >= start) & (outs < start + width)
            for first_rank in range(0, rank, RANKS):
                ranks = first_rank + tl.arange(0, RANKS)
                has_rank = ranks < rank
                lowered = tl.zeros([ROWS, RANKS], tl.float32)
                for split in tl.static_range(SPLITS):
                    lowered_ptrs = (
                        lowered_ptr
                        + split * lowered_stride_split
                        + part * lowered_stride_part
                        + places.to(tl.int64)[:, None] * lowered_stride_place
                        + ranks[None, :]
                    )
                    lowered += tl.load(lowered_ptrs, mask=has_row[:, None], other=0.0)
                b_ptrs = b_ptr + ranks[:, None] * b_stride_rank + (outs - start)[None, :]
                b = tl.load(b_ptrs, mask=has_rank[:, None] & has_out[None, :], other=0.0)
                acc = tl.dot(lowered.to(b.dtype), b, acc, input_precision="ieee")
        if sum_of_ranks > 0:
            rows = tl.load(rows_ptr + places, mask=has_row, other=0)
            out_ptrs = out_ptr + rows[:, None] * out_stride_row + outs[None, :]
            is_there = has_row[:, None] & (outs < out_features)[None, :]
            acc += tl.load(out_ptrs, mask=is_there, other=0.0).to(tl.float32)
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_there)


def add_low_rank(x: torch.Tensor, out: torch.Tensor, table: LowRankTable, rows: AdaptedRows) -> None:
    """Add the adapters' products of `x` to `out`. The result between the two products is rounded to their dtype; sums are in fp32.

    Args:
        x: `[num_rows, inputs]` fp32/fp16/bf16, the table's dtype, last stride 1.
        out: `[num_rows, outputs]`, the parts' outputs side by side; the same dtype, last stride 1; changed in place.
        rows: the rows of each slot, each at most once. Slots without matrices add nothing.

    Raises:
        ValueError: wrong shape, dtype or stride.
    """
    num_parts, in_features = len(table.widths), table.num_inputs
    require_shape("x", x, ("num_rows", table.num_inputs))
    require_shape("out", out, (len(x), sum(table.widths)))
    require_dtype("x", x, *FLOAT_DTYPES)
    for name, tensor in (("x", x), ("out", out)):
        require_dtype(name, tensor, table.dtype)
        require_unit_stride(name, tensor)
    require_shape("tiles", rows.tiles, ("num_tiles", 3))
    if not len(rows.tiles):
        return
    tiling = rows.tiling
    num_splits = min(_MAX_SPLITS, triton.cdiv(in_features, _SPLIT_INS)) if tiling.is_split else 1
    num_ranks = triton.cdiv(table.max_rank, tiling.ranks) * tiling.ranks
    lowered = torch.empty((num_splits, len(rows.rows), num_parts, num_ranks), dtype=torch.float32, device=x.device)
    _shrink_kernel[(len(rows.tiles), num_parts * num_splits)](
        x,
        table.entries,
        table.scalings,
        rows.rows,
        rows.tiles,
        lowered,
        num_parts,
        in_features,
        x.stride(0),
        triton.cdiv(in_features, _ALIGNMENT) * _ALIGNMENT,
        *lowered.stride()[:3],
        ROWS=tiling.rows,
        RANKS=tiling.ranks,
        INS=tiling.shrink_ins,
        SPLITS=num_splits,
        FIELDS=_FIELDS,
        num_warps=tiling.shrink_warps,
        num_stages=tiling.stages,
    )
    _expand_kernel[(len(rows.tiles), triton.cdiv(out.shape[1], tiling.expand_outs))](
        lowered,
        table.entries,
        rows.rows,
        rows.tiles,
        out,
        num_parts,
        out.shape[1],
        out.stride(0),
        *lowered.stride()[:3],
        ROWS=tiling.rows,
        RANKS=tiling.ranks,
        OUTS=tiling.expand_outs,
        SPLITS=num_splits,
        FIELDS=_FIELDS,
        IS_ALIGNED=table.is_aligned,
        num_warps=tiling.expand_warps,
        num_stages=tiling.stages,
    )
