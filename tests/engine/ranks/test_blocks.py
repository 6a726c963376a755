"""Blocks of ranks whose pools the leader cannot reach, over a device that copies as late as a GPU may."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.ranks.blocks import BlockServer, BlocksOfRank, Moved, OwnBlocks, ToBlocks
from kvrelay.engine.ranks.link import Link
from tests.engine.kv.test_fragments import NUM_BLOCKS, geometry
from tests.engine.late_device import LateDevice

from .rig import expect_errors_of_copies, expect_whole_blocks

MakeRank = Callable[[torch.Tensor, LateDevice], BlocksOfRank]


@pytest.fixture
def rank_of() -> Iterator[MakeRank]:
    """Makes the leader's end of a rank with such a pool."""
    links: list[Link] = []
    threads: list[threading.Thread] = []
    descriptors: list[int] = []

    def make(blocks: torch.Tensor, device: LateDevice) -> BlocksOfRank:
        ours, theirs = socket.socketpair()
        descriptors.append(os.memfd_create("block"))
        links.extend((Link(ours, Moved), Link(theirs, ToBlocks)))
        server = BlockServer(links[-1], blocks, descriptors[-1], device)
        threads.append(threading.Thread(target=server.serve))
        threads[-1].start()
        return BlocksOfRank(links[-2], descriptors[-1], blocks.shape[1])

    yield make
    for link in links:
        link.shut()
    for thread in threads:
        thread.join()
    for link in links:
        link.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_blocks_of_two_ranks_are_put_together_and_taken_apart(rank_of: MakeRank) -> None:
    layout = geometry("one", 2)
    pools = [torch.zeros(NUM_BLOCKS, layout.physical_nbytes // 2, dtype=torch.uint8) for _ in range(2)]
    parts = [OwnBlocks(pools[0], LateDevice(random.Random(1))), rank_of(pools[1], LateDevice(random.Random(2)))]
    expect_whole_blocks(GatheredStore(layout, NUM_BLOCKS, parts), pools, layout)


def test_a_copy_that_fails_and_a_rank_that_is_gone_are_errors(rank_of: MakeRank) -> None:
    layout = geometry("one", 2)
    pools = [torch.zeros(NUM_BLOCKS, layout.physical_nbytes // 2, dtype=torch.uint8) for _ in range(2)]
    remote = rank_of(pools[1], LateDevice(fails_at=2))
    store = GatheredStore(layout, NUM_BLOCKS, [HostPart(pools[0].numpy()), remote])
    expect_errors_of_copies(store, remote, layout)
