"""The cut of a batch into splits: every key in one split, a program for every split, and even lengths."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.splits import find_split, most_splits, most_waves
from kvrelay.kernels.checks import next_power_of_2

KEYS, MIN_KEYS = 64, 128


@triton.jit
def _plan_kernel(
    seq_lens_ptr,
    plan_ptr,
    num_seqs,
    max_waves,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    WAVE: tl.constexpr,
):
    item = tl.program_id(0)
    seq, first_split, num_splits = find_split(
        item, seq_lens_ptr, 0, num_seqs, max_waves, SEQS, KEYS, MIN_KEYS, WAVE, False, 0
    )
    tl.store(plan_ptr + 3 * item, seq)
    tl.store(plan_ptr + 3 * item + 1, first_split)
    tl.store(plan_ptr + 3 * item + 2, num_splits)


def _plan(seq_lens: list[int], wave: int, device: str) -> list[list[int]]:
    """`[sequence, its first split, its number of splits]` of every program, and of one more, which should be idle."""
    num_seqs = len(seq_lens)
    bound = most_splits(num_seqs, wave)
    plan = torch.full((bound + 1, 3), -1, dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    seqs = max(16, next_power_of_2(num_seqs))
    _plan_kernel[(bound + 1,)](lens, plan, num_seqs, most_waves(num_seqs, wave), seqs, KEYS, MIN_KEYS, wave)
    return plan.tolist()


@pytest.mark.parametrize(
    ("seq_lens", "wave", "expected"),
    [
        ([1], 8, [1]),
        ([64], 8, [1]),
        ([129], 8, [2]),  # of at least 128 keys
        ([0, 0], 8, [1, 1]),
        ([10_000], 4, [4]),
        ([32 * 1024], 49, [47]),  # 49 splits would have 668.7 keys; in tiles of 64 that is 704 keys, so 47 are enough
        ([32 * 1024], 396, [91]),  # 91 splits of 362 keys, not 396: they are combined one after the other
        ([9000, 10, 10, 10], 4, [5, 1, 1, 1]),  # the long one gets the splits that the short ones do not need
    ],
)
def test_numbers_of_splits(device: str, seq_lens: list[int], wave: int, expected: list[int]) -> None:
    plan = _plan(seq_lens, wave, device)
    assert [sum(seq == index for seq, _, _ in plan) for index in range(len(seq_lens))] == expected


@pytest.mark.parametrize(
    ("num_seqs", "expected"),
    [
        (4, 11),  # one wave of 44 splits: a longest split is rounded up to tiles
        (32, 1),  # 32 splits: most of a wave
        (50, 3),  # 150 splits leave one for a fourth wave; 50 and 100 leave so few, too, but larger ones
        (64, 2),  # not 64 splits, whose second wave would have 15
    ],
)
def test_splits_of_equal_sequences_fill_waves(device: str, num_seqs: int, expected: int) -> None:
    """49 splits run at once; 25 keep the memory busy."""
    plan = _plan([4096] * num_seqs, 49, device)
    assert [seq for seq, _, _ in plan].count(0) == expected, plan


def test_the_longest_split_is_short_in_any_batch(device: str) -> None:
    """Just one sequence is long, among as many as a wave has splits. It gets as many splits as keep the memory busy."""
    plan = _plan([32768] + [64] * 48, 49, device)
    assert [seq for seq, _, _ in plan].count(0) >= 25, plan


@pytest.mark.parametrize("wave", [1, 2, 7, 49, 396])
def test_bounds_grow_with_the_batch(wave: int) -> None:
    bounds = [most_splits(num_seqs, wave) for num_seqs in range(1, 600)]
    assert bounds == sorted(bounds)
    assert all(most_waves(n, wave) - -(-n // wave) < 8 for n in range(1, 600))


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
            assert own, (seq_lens, plan)
            assert seq_len > 0 or len(own) == 1, (seq_lens, plan)
            assert all(plan[item][1:] == [first, len(own)] for item in own), (seq_lens, plan)
            first += len(own)
        assert all(seq >= len(seq_lens) for seq, _, _ in plan[first:]), (seq_lens, plan)
        assert first < len(plan), (seq_lens, plan)
