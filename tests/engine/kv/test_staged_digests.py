"""Digests that a device makes of its blocks, and memory that its copies reach directly."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvrelay.common.block_digests import digests_of
from kvrelay.engine.kv.device.copies import Digests
from kvrelay.engine.kv.device.registered import RegisteredMemory

from ..late_device import LateDevice
from .test_staging import NBYTES, Bench


def test_digests_are_of_what_the_group_uses_of_its_block() -> None:
    bench = Bench(device=LateDevice(hashes=True), group_nbytes=[NBYTES, 40])
    bench.blocks[3, 40:] = 0xEE  # another group's, from an earlier use
    read = bench.staging.open_read(3, 40)
    bench.wait(read)
    assert read.digests(40) == digests_of(memoryview(bytes([4]) * 40))
    assert bench.staging.begin_write(5, memoryview(b"x" * 40))() == digests_of(memoryview(b"x" * 40))


def test_who_waits_first_has_all_blocks_of_a_size_hashed_that_are_on_their_way() -> None:
    bench = Bench(device=LateDevice(hashes=True), group_nbytes=[NBYTES, 40])
    payloads = [bytes([number]) * nbytes for number, nbytes in enumerate((NBYTES, 40, NBYTES, 40, NBYTES))]
    waits = [bench.staging.begin_write(block_id, memoryview(one)) for block_id, one in enumerate(payloads)]
    assert bench.device.num_digests == 1, "digests are launched before anybody waits for them"
    for number in (2, 0, 1, 4, 3):
        assert waits[number]() == digests_of(memoryview(payloads[number]))
    assert bench.device.num_digests == 3, "one at the start, and one for each size"


def test_digests_that_cannot_be_launched_are_not_tried_for_others() -> None:
    """Whoever waits gets an error, and no later reader's digests depend on this block."""
    bench = Bench(device=LateDevice(hashes=True))
    waits = [bench.staging.begin_write(block_id, memoryview(bytes(NBYTES))) for block_id in range(2)]
    bench.device.fails_to_digest = True
    with pytest.raises(RuntimeError, match="no memory for digests"):
        waits[0]()
    bench.device.fails_to_digest = False
    hashed: list[list[int]] = []
    digest = bench.device.digest

    def watched(blocks: torch.Tensor, block_ids: Sequence[int], nbytes: int) -> Digests:
        hashed.append([*block_ids])
        return digest(blocks, block_ids, nbytes)

    bench.device.digest = watched  # type: ignore[method-assign]
    assert waits[1]() == digests_of(memoryview(bytes(NBYTES)))
    assert hashed == [[1]]


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_share_launches_get_the_digests_of_their_own_blocks(seed: int) -> None:
    """Each has blocks and a page of its own, copies some of the blocks in or out, and waits in any order."""
    bench = Bench(16, device=LateDevice(random.Random(seed), hashes=True, reaches=True), group_nbytes=[NBYTES, 40])
    assert bench.staging.registered is not None
    memory = memoryview(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    end = bench.staging.registered.register(memory)
    assert end is not None

    def work(number: int) -> int:
        chance, page = random.Random(f"{seed} {number}"), memory[number * mmap.PAGESIZE :]
        num_blocks = 0
        for _ in range(50):
            nbytes, comes_in = chance.choice([NBYTES, 40]), chance.random() < 0.5
            waits = []
            for place in range(chance.randrange(1, 5)):
                block_id, part = 4 * number + place, page[place * NBYTES : place * NBYTES + nbytes]
                if comes_in:
                    part[:] = chance.randbytes(nbytes)
                    wait = bench.staging.begin_write(block_id, part)
                else:
                    wait = bench.staging.open_read(block_id, nbytes).begin_copy_to(part)  # type: ignore[assignment]
                waits.append((block_id, part, wait))
            num_blocks += len(waits)
            chance.shuffle(waits)
            for block_id, part, wait in waits:
                assert wait() == digests_of(part)
                assert bench.blocks[block_id, :nbytes].numpy().tobytes() == bytes(part)
                if not comes_in:
                    bench.staging.close_read(block_id)
        return num_blocks

    with ThreadPoolExecutor(4) as threads:
        num_blocks = sum(threads.map(work, range(4)))
    end()
    assert bench.device.num_digests < num_blocks


def test_a_device_that_cannot_hash_one_group_hashes_none() -> None:
    bench = Bench(device=LateDevice(hashes=True, reaches=True), group_nbytes=[NBYTES, 36])
    assert bench.staging.registered is None
    read = bench.open_read(3)
    bench.wait(read)
    assert read.digests(NBYTES) is None
    assert bench.staging.begin_write(5, memoryview(b"x" * 36))() == digests_of(memoryview(b"x" * 36))


def test_only_memory_that_is_registered_in_full_is_reached() -> None:
    device = LateDevice(reaches=True)
    registered = RegisteredMemory(device)
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        both = memoryview(memory)
        page = both[: mmap.PAGESIZE]
        end = registered.register(page)
        assert end is not None
        found = registered.find(page[8:24])
        assert found is not None
        found.fill_(7)
        assert bytes(both[7:25]) == b"\0" + b"\x07" * 16 + b"\0"
        assert registered.find(both[mmap.PAGESIZE - 8 : mmap.PAGESIZE + 8]) is None
        assert registered.find(both[mmap.PAGESIZE :]) is None
        end()
        assert registered.find(page[8:24]) is None
        assert not device.registered
        page.release()
        both.release()


def test_a_device_that_reaches_nothing_says_so_once_for_each_ring(caplog: pytest.LogCaptureFixture) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as view:
        assert RegisteredMemory(LateDevice(reaches=False)).register(view) is None
    assert [record.message for record in caplog.records] == [
        "the device cannot reach memory that is shared with it; its blocks pass pinned memory"
    ]
