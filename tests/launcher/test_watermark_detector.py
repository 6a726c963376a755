"""The watermark's hash, which may never change, and the detector's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvrelay.engine.sampling.watermark import is_green, keys_of, mix, threshold_of
from kvrelay.launcher.watermark import Detection, detect


def words(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, dtype=np.uint32)


def by_hand(word: int) -> int:
    """MurmurHash3's finalizer with Python's integers."""
    word ^= word >> 16
    word = word * 0x85EBCA6B % 2**32
    word ^= word >> 13
    word = word * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def test_the_hash_is_fixed_for_ever() -> None:
    # Values of the published function: fmix32(1) and fmix32(0xDEADBEEF).
    assert mix(words(0, 1, 0xDEADBEEF)).tolist() == [0, 0x514E28B7, 0x0DE5C6A9]
    values = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    assert mix(values).tolist() == [by_hand(word) for word in values.tolist()]
    assert keys_of(words(0, 7, 2**32 - 1)).tolist() == [by_hand((w + 0x9E3779B9) % 2**32) for w in (0, 7, 2**32 - 1)]
    green = is_green(np.repeat(words(0, 1, 49151), 20), np.tile(np.arange(20, dtype=np.uint32), 3), 0.5)
    assert "".join(map(str, green.astype(int))) == "011011110110010100111000011101110010110010001110101101111110"


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5, 0.9])
def test_each_token_makes_its_own_part_of_the_vocabulary_green(gamma: float) -> None:
    vocab = np.arange(49_152, dtype=np.uint32)
    lists = [is_green(np.full_like(vocab, previous), vocab, gamma) for previous in (0, 1, 2, 3, 30_000, 49_151)]
    for green in lists:
        assert green.mean() == pytest.approx(gamma, abs=0.01)
    for index, one in enumerate(lists):
        for other in lists[:index]:
            assert (one & other).mean() == pytest.approx(gamma**2, abs=0.01)


def test_each_pair_counts_once() -> None:
    pairs = {(1, 2), (2, 1), (2, 3)}
    green = sum(bool(is_green(words(a), words(b), 0.5)[0]) for a, b in pairs)
    found = detect([1, 2, 1, 2, 1, 2, 3], 0.5)
    assert (found.num_scored, found.num_green) == (3, green)
    assert detect([1, 1, 1, 1]).num_scored == 1
    for short in ([], [5]):
        nothing = detect(short)
        assert (nothing.num_scored, nothing.green_fraction, nothing.z, nothing.p_value) == (0, 0.0, 0.0, 0.5)


def test_z_and_p_by_hand() -> None:
    found = Detection(num_scored=100, num_green=70, gamma=0.5)
    assert (found.green_fraction, found.z) == (0.7, pytest.approx(4.0))
    assert found.p_value == pytest.approx(3.167e-5, rel=1e-3)
    quarter = Detection(num_scored=48, num_green=24, gamma=0.25)
    assert quarter.z == pytest.approx(12 / math.sqrt(48 * 0.25 * 0.75))


def test_chance_has_no_watermark() -> None:
    generator = np.random.default_rng(1)
    scores = [detect(generator.integers(0, 49_152, 201).tolist(), gamma).z for gamma in (0.25, 0.5) for _ in range(200)]
    assert abs(np.mean(scores)) < 0.2
    assert np.std(scores) == pytest.approx(1.0, abs=0.1)
    assert max(scores) < 4


@pytest.mark.parametrize("gamma", [0.0, 1.0, -1.0, math.nan])
def test_a_part_that_is_none_or_all_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma is .*; it must lie between 0 and 1"):
        detect([1, 2], gamma)
    assert 0 <= threshold_of(0.0) <= threshold_of(1.0) <= 2**32 - 1
