"""The digests of a block's stretches, alone and while it is copied."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash

from kvrelay.common.block_digests import STRETCH_NBYTES, copied, digests_of, landed, num_stretches

SIZES = [1, STRETCH_NBYTES - 1, STRETCH_NBYTES, 2 * STRETCH_NBYTES - 1, 2 * STRETCH_NBYTES, 5 * STRETCH_NBYTES + 3]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_block_has_a_digest_of_each_stretch_and_the_last_takes_the_rest(nbytes: int) -> None:
    block = random.Random(nbytes).randbytes(nbytes)
    count = max(1, nbytes // STRETCH_NBYTES)
    starts = [number * STRETCH_NBYTES for number in range(count)]
    stretches = [block[start:end] for start, end in zip(starts, [*starts[1:], nbytes], strict=True)]
    assert b"".join(stretches) == block
    expected = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(stretch)) for stretch in stretches)
    assert digests_of(memoryview(block)) == expected
    assert len(expected) == 8 * num_stretches(nbytes)


@pytest.mark.parametrize("copy", [copied, landed])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_copy_is_digested_on_its_way(nbytes: int, copy: object) -> None:
    source = memoryview(random.Random(nbytes).randbytes(nbytes))
    target = memoryview(bytearray(nbytes + 2))
    assert copy(source, target[1:-1]) == digests_of(source)  # type: ignore[operator]
    assert bytes(target) == b"\0" + bytes(source) + b"\0"


class Torn(bytearray):
    """Memory that loses what is written to it, in whole or in part."""

    def __setitem__(self, part: object, content: object) -> None:
        pass

    def __getitem__(self, part: slice) -> Torn:  # type: ignore[override]
        return Torn(super().__getitem__(part))


def test_what_landed_is_digested_where_it_landed() -> None:
    source = memoryview(b"x" * 100)
    assert landed(source, Torn(100)) == digests_of(memoryview(bytes(100)))  # type: ignore[arg-type]
    assert copied(source, Torn(100)) == digests_of(source)  # type: ignore[arg-type]
