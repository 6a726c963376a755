"""Philox against the vectors published with Random123, and the uniforms made from it."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.engine.sampling.noise import philox4x32, uniforms

# kat_vectors of Random123: philox4x32, 10 rounds: counter, key, output.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_published_vectors(counter: str, key: str, output: str) -> None:
    result = philox4x32(
        np.array(words(counter), dtype=np.uint64)[:, None], np.array(words(key), dtype=np.uint64)[:, None]
    )
    assert result[:, 0].tolist() == words(output)


def test_a_batch_is_its_rows() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 100, dtype=np.uint64)
    choices = generator.integers(0, 2**31, 100, dtype=np.uint64)
    positions = generator.integers(0, 2**40, 100, dtype=np.uint64)
    alone = [uniforms(seeds[i : i + 1], choices[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert uniforms(seeds, choices, positions).tolist() == alone


def test_uniforms_are_uniform_and_distinct() -> None:
    seeds, positions = np.full(20_000, 5, dtype=np.uint64), np.arange(20_000, dtype=np.uint64)
    draws = uniforms(seeds, np.zeros_like(seeds), positions)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert len(set(draws.tolist())) == 20_000
    np.testing.assert_allclose(np.histogram(draws, 10, (0, 1))[0] / 20_000, 0.1, atol=0.01)
    others = uniforms(seeds, np.ones_like(seeds), positions)
    assert not set(others.tolist()) & set(draws.tolist())
    assert abs(np.corrcoef(draws, others)[0, 1]) < 0.02


def test_the_stream_is_fixed_for_ever() -> None:
    # Workers of different versions continue each other's sequences, so these numbers may never change.
    zeros = np.zeros(3, dtype=np.uint64)
    draws = uniforms(np.array([0, 42, 2**64 - 1], np.uint64), zeros, np.array([0, 7, 2**33], np.uint64))
    assert [draw.hex() for draw in draws.tolist()] == [
        "0x1.989fa35785a70p-2",
        "0x1.6ef60ec5a1e12p-2",
        "0x1.8985c47d94cacp-2",
    ]
    choice = uniforms(*(np.array([word], np.uint64) for word in (42, 2**31 - 1, 7)))
    assert choice[0].hex() == "0x1.ee591a75fbf5ap-1"
