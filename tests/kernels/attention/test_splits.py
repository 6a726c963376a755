"""The cut of a batch into splits: every key in one split, a program for every split, and even lengths."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.splits import find_split

KEYS, MIN_KEYS = 64, 128


@triton.jit
def _plan_kernel(
    seq_lens_ptr,
    plan_ptr,
    num_seqs,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    item = tl.program_id(0)
    seq, first_split, num_splits = find_split(
        item, seq_lens_ptr, 0, num_seqs, SEQS, KEYS, MIN_KEYS, MAX_SPLITS, False, 0
    )
    tl.store(plan_ptr + 3 * item, seq)
    tl.store(plan_ptr + 3 * item + 1, first_split)
    tl.store(plan_ptr + 3 * item + 2, num_splits)


def _plan(seq_lens: list[int], max_splits: int, device: str) -> list[list[int]]:
    """`[sequence, its first split, its number of splits]` of every program, and of one more, which should be idle."""
    bound = max_splits + 2 * len(seq_lens) - 1
    plan = torch.full((bound + 1, 3), -1, dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    _plan_kernel[(bound + 1,)](lens, plan, len(seq_lens), 16, KEYS, MIN_KEYS, max_splits)
    return plan.tolist()


@pytest.mark.parametrize(
    ("seq_lens", "max_splits", "expected"),
    [
        ([1], 8, [1]),
        ([128], 8, [1]),
        ([129], 8, [2]),
        ([0, 0], 8, [0, 0]),
        ([10_000], 4, [5]),  # five splits of 2000 keys, in tiles of 64
        ([32 * 1024], 33, [32]),  # 34 splits would have 963.8 keys; in tiles of 64 that is 1024 keys, so 32 are enough
        ([1000, 0, 1000], 1, [2, 0, 2]),
        ([100] * 16, 33, [1] * 16),
        ([9000, 10, 10, 10], 4, [8, 1, 1, 1]),  # the long one gets the splits that the short ones do not need
    ],
)
def test_numbers_of_splits(device: str, seq_lens: list[int], max_splits: int, expected: list[int]) -> None:
    plan = _plan(seq_lens, max_splits, device)
    assert [sum(seq == index for seq, _, _ in plan) for index in range(len(seq_lens))] == expected


def test_any_batch_is_covered(device: str) -> None:
    """Splits are numbered in order, each sequence's count is right, and the last program is always idle."""
    random.seed(3)
    for _ in range(12):
        seq_lens = [random.choice((0, 1, 127, 128, 129, random.randrange(9000))) for _ in range(random.randint(1, 13))]
        plan = _plan(seq_lens, random.choice((1, 2, 7, 33)), device)
        first = 0
        for index, seq_len in enumerate(seq_lens):
            own = [item for item, (seq, _, _) in enumerate(plan) if seq == index]
            assert own == list(range(first, first + len(own))), (seq_lens, plan)
            assert bool(own) == (seq_len > 0)
            assert all(plan[item][1:] == [first, len(own)] for item in own), (seq_lens, plan)
            first += len(own)
        assert all(seq >= len(seq_lens) for seq, _, _ in plan[first:]), (seq_lens, plan)
        assert first < len(plan), (seq_lens, plan)
