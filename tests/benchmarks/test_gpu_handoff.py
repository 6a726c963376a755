"""The hand-off benchmark of benchmarks/gpu.py stops its clock when the blocks are in the pool, not in a pinned slot."""

from __future__ import annotations

import threading
from multiprocessing.connection import Pipe
from typing import cast

import pytest
import torch
from gpu_parts.engine.handoff import settle
from gpu_parts.frame.sizes import BLOCK_SIZE, TINY
from handoff_parts.pools import Pool, Sizes
from handoff_parts.rounds import Way
from handoff_parts.ways import KvrelayReceiver, KvrelaySender

from kvrelay.engine.config.model import parse_config
from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool

from ..engine.late_device import LateCopied, LateDevice


class NothingHolds(LateDevice):
    """A device whose copies happen only when the host waits for them. Steps do not wait for copies."""

    def hold_steps(self, copied: LateCopied) -> None:
        """Let the step run without waiting for the copy."""


def late_pool(num_blocks: int) -> tuple[KvPool, NothingHolds]:
    device = NothingHolds()
    geometry = geometry_of(parse_config(TINY.config(), "a test's model"), BLOCK_SIZE, torch.float32)
    staging = StagingPlan(device)
    return KvPool(geometry, num_blocks, torch.device("cpu"), staging=staging), device


def test_settled_is_what_the_device_has() -> None:
    pool, _ = late_pool(4)
    pool.open_write(1)[:] = b"\x01" * pool.block_nbytes
    pool.close_write(1)
    assert not pool.tensor[1].any()
    settle(pool)
    assert pool.tensor[1].all()
    settle(pool)  # nothing is in flight


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_round_is_not_over_before_its_blocks_have_settled(is_shared: bool) -> None:
    sizes = Sizes(BLOCK_SIZE * TINY.kv_bytes_per_token, 6)
    ours, theirs = Pipe()
    pool, _ = late_pool(7)
    source = Pool(sizes)
    source.bytes[:] = b"\x07" * sizes.nbytes
    heard: list[bool] = []

    def settled() -> None:
        settle(pool)
        heard.append(bool(pool.tensor[:6].all()))

    way = Way("shared" if is_shared else "verified")
    receiver = KvrelayReceiver(cast(Pool, pool), sizes, theirs, way, settle=settled)
    sender = KvrelaySender(source, sizes, ours, receiver.address, way)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        assert sender.run() > 0
        assert heard == [True]
    finally:
        thread.join(30)
        sender.close()
        receiver.close()
