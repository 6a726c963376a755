"""Adapters' products against float64: several ranks and adapters in one launch, missing parts, empty tiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.linear.low_rank import (
    FEW_ROWS,
    FP32_ROWS,
    MANY_ROWS,
    AdaptedRows,
    LowRankTable,
    Tiling,
    add_low_rank,
    add_low_rank_reference,
)
from tests.kernels.conftest import DTYPES, TOLERANCES

Randn = Callable[..., torch.Tensor]
Parts = dict[int, list[tuple[int, torch.Tensor, torch.Tensor, float]]]
NUM_SLOTS, MAX_RANK = 5, 48


def adapted_rows(device: str, slots: list[int], tiling: Tiling, num_spare: int = 0) -> AdaptedRows:
    """`num_spare`: unused row places and tiles, as in a CUDA graph."""
    rows: list[int] = []
    tiles: list[list[int]] = []
    for slot in sorted(set(slots) - {0}):
        own = [row for row, other in enumerate(slots) if other == slot]
        for at in range(0, len(own), tiling.rows):
            tiles.append([slot, len(rows) + at, min(tiling.rows, len(own) - at)])
        rows += own
    return AdaptedRows(
        tiling,
        torch.tensor(rows + [0] * num_spare, dtype=torch.int64, device=device),
        torch.tensor(tiles + [[0, 0, 0]] * num_spare, dtype=torch.int32, device=device).view(-1, 3),
    )


def adapters(randn: Randn, table: LowRankTable, num_ins: int, ranks: dict[int, list[int]], dtype: torch.dtype) -> Parts:
    """Put adapters with the ranks of each part into their slots. Rank 0 means that the part is missing."""
    made: Parts = {}
    for slot, of_parts in ranks.items():
        made[slot] = []
        for part, rank in enumerate(of_parts):
            if rank:
                a = randn(rank, num_ins, dtype=dtype) / math.sqrt(num_ins)
                b = randn(table.widths[part], rank, dtype=dtype)
                table.put(slot, part, a, b, 0.5 + slot)
                made[slot].append((sum(table.widths[:part]), a, b, 0.5 + slot))
    return made


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows relative to their norms, because the intermediate result is rounded, too."""
    errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.nan_to_num(nan=torch.inf).max()) < TOLERANCES[actual.dtype]["rtol"] / 2, errors


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tiling", "num_rows", "num_ins", "widths"),
    [
        (FEW_ROWS, 9, 80, (48, 16, 16)),  # a tile of columns over three parts
        (FEW_ROWS, 40, 1100, (136, 136)),  # splits; a tile of columns with the end of one part and the start of another
        (MANY_ROWS, 150, 72, (130,)),
        (MANY_ROWS, 70, 130, (40, 36)),  # unaligned sizes
    ],
)
def test_products(
    device: str, randn: Randn, dtype: torch.dtype, tiling: Tiling, num_rows: int, num_ins: int, widths: tuple[int, ...]
) -> None:
    tiling = FP32_ROWS if dtype == torch.float32 else tiling
    table = LowRankTable(NUM_SLOTS, num_ins, widths, MAX_RANK, dtype, torch.device(device))
    ranks = {1: [16, 3, 0], 2: [0, 48, 40], 3: [8, 8, 8], 5: [33, 0, 1]}
    made = adapters(randn, table, num_ins, {slot: one[: len(widths)] for slot, one in ranks.items()}, dtype)
    generator = torch.Generator().manual_seed(num_rows)
    # Slot 4 is empty; slot 3 has the most rows.
    slots = [min(slot, 5) if slot < 6 else 3 for slot in torch.randint(9, (num_rows,), generator=generator).tolist()]
    x = randn(num_rows, num_ins + 8, dtype=dtype)[:, :num_ins]  # strided
    before = randn(num_rows, sum(widths) + 8, dtype=dtype)
    after = before.clone()
    add_low_rank(x, after[:, : sum(widths)], table, adapted_rows(device, slots, tiling, num_spare=3))
    expected = before.double()
    add_low_rank_reference(x, expected[:, : sum(widths)], made, slots)
    assert_close(after, expected)
    is_base = torch.tensor([slot in (0, 4) for slot in slots])
    assert is_base.any()
    assert torch.equal(after[is_base], before[is_base])
    assert torch.equal(after[:, sum(widths) :], before[:, sum(widths) :])


def test_the_largest_rank(device: str, randn: Randn) -> None:
    table = LowRankTable(NUM_SLOTS, 96, (64,), 256, torch.bfloat16, torch.device(device))
    made = adapters(randn, table, 96, {1: [256]}, torch.bfloat16)
    x, out = randn(2, 96, dtype=torch.bfloat16), randn(2, 64, dtype=torch.bfloat16)
    expected = out.double()
    add_low_rank_reference(x, expected, made, [1, 1])
    add_low_rank(x, out, table, adapted_rows(device, [1, 1], FEW_ROWS))
    assert_close(out, expected)


def test_a_dropped_slot_adds_nothing_and_can_be_used_again(device: str, randn: Randn) -> None:
    dtype = torch.bfloat16
    table = LowRankTable(NUM_SLOTS, 64, (32, 32), MAX_RANK, dtype, torch.device(device))
    adapters(randn, table, 64, {2: [8, 8]}, dtype)
    x, before = randn(3, 64, dtype=dtype), randn(3, 64, dtype=dtype)
    table.drop(2)
    rows, out = adapted_rows(device, [2, 0, 2], FEW_ROWS), before.clone()
    add_low_rank(x, out, table, rows)
    assert torch.equal(out, before)
    made = adapters(randn, table, 64, {2: [0, 4]}, dtype)
    expected = before.double()
    add_low_rank_reference(x, expected, made, [2, 0, 2])
    add_low_rank(x, out, table, rows)
    assert_close(out, expected)


def test_one_row_does_not_change_another(device: str, randn: Randn) -> None:
    """NaN in one row leaves all others bit-identical. A row's result does not depend on the other rows and adapters."""
    dtype = torch.bfloat16
    table = LowRankTable(NUM_SLOTS, 64, (48,), MAX_RANK, dtype, torch.device(device))
    adapters(randn, table, 64, {1: [8], 2: [40]}, dtype)
    x, slots = randn(6, 64, dtype=dtype), [1, 2, 1, 0, 2, 1]

    def added(rows: slice) -> torch.Tensor:
        out = torch.ones(6, 48, dtype=dtype, device=device)[rows]
        add_low_rank(x[rows], out, table, adapted_rows(device, slots[rows], FEW_ROWS))
        return out

    good = added(slice(0, 6))
    assert torch.equal(added(slice(2, 5)), good[2:5])
    x[2] = torch.nan
    spoilt = added(slice(0, 6))
    assert spoilt[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoilt[others], good[others])


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    table = LowRankTable(NUM_SLOTS, 32, (24, 8), MAX_RANK, torch.bfloat16, torch.device(device))
    x, out = randn(2, 32, dtype=torch.bfloat16), randn(2, 32, dtype=torch.bfloat16)
    rows = adapted_rows(device, [1, 0], FEW_ROWS)
    for given, message in (
        ((x[0], out), r"x has shape \(32,\), expected \[num_rows, 32\]"),
        ((x, out[:, :30]), r"out has shape \(2, 30\), expected \[2, 32\]"),
        ((x.half(), out), r"x has dtype torch\.float16, expected torch\.bfloat16"),
        ((x, out.T.contiguous().T[:2]), r"out has last stride 2, expected 1"),
    ):
        with pytest.raises(ValueError, match=message):
            add_low_rank(*given, table, rows)
    for a, b, message in (
        (x[:, :30], out[:, :2], r"a has shape \(2, 30\), expected \[rank, 32\]"),
        (x, out[:, :2], r"b has shape \(2, 2\), expected \[24, 2\]"),
        (x.float(), randn(24, 2), r"a has dtype torch\.float32"),
        (randn(49, 32).bfloat16(), randn(24, 49).bfloat16(), r"rank is 49, expected at most 48"),
    ):
        with pytest.raises(ValueError, match=message):
            table.put(1, 0, a, b, 1.0)
