"""A pool with a tier in the host's memory below it, for tests."""

from __future__ import annotations

import mmap
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from kvrelay.common.block_hash import HashChain
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.device.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.kv.host.tier import HostTier
from kvrelay.engine.kv.lower_tier import Fetch
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.step.interface import BlockStore

from ..late_device import LateDevice

BLOCK = 4
TOKEN_NBYTES = 32
WAYS = [
    *("plain", "ranks", "staged", "hashing", "direct"),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
Windows = tuple[int | None, ...]


def geometry_of(windows: Windows) -> KvGeometry:
    groups = tuple(
        KvGroup(
            kind=GroupKind.FULL if window is None else GroupKind.WINDOW,
            window=window,
            layers=(number,),
            num_kv_heads=1,
            key_size=TOKEN_NBYTES,
            value_size=0,
            dtype="uint8",
        )
        for number, window in enumerate(windows)
    )
    return KvGeometry(groups=groups, block_size=BLOCK)


def device_of(way: str, chance: random.Random | None = None) -> LateDevice | None:
    if way in ("plain", "ranks", "cuda"):
        return None
    return LateDevice(chance, hashes=way in ("hashing", "direct"), reaches=way == "direct")


class Rig:
    """A pool, its blocks and the tier. ``computed`` writes what stands for K/V; the test calls ``work``."""

    def __init__(
        self,
        windows: Windows = (None,),
        num_blocks: int = 8,
        num_kept: int = 64,
        way: str = "plain",
        chance: random.Random | None = None,
    ) -> None:
        geometry = geometry_of(windows)
        num_physical = num_blocks * len(windows)
        self.device = device = device_of(way, chance)
        nbytes = geometry.physical_nbytes
        on, staging = torch.device("cpu"), None if device is None else StagingPlan(device, 6 * nbytes)
        if way == "cuda":
            on, staging = torch.device("cuda"), StagingPlan(CudaCopies(torch.device("cuda")), 6 * nbytes)
        self.pool = KvPool(geometry, num_physical, on, staging=staging)
        self.blocks = BlockManager(num_physical, BLOCK, lambda: 0.0, windows=windows)
        self.blocks.leaves_owed = True
        store: BlockStore = self.pool
        if way == "ranks":
            store = GatheredStore(geometry, num_physical, [HostPart(self.pool.blocks.numpy())])
        self.told: Counter[str] = Counter()
        self._changed = threading.Condition()
        self.num_returned = 0
        self.memory = memoryview(mmap.mmap(-1, num_kept * nbytes))
        self.tier = HostTier(store, self.blocks, geometry, self.memory, tell=self._hear, on_returned=self._on_returned)
        self.blocks.attach(self.tier)
        self._num_sequences = 0

    def _hear(self, event: str, number: int) -> None:
        self.told[event] += number

    def _on_returned(self) -> None:
        with self._changed:
            self.num_returned += 1
            self._changed.notify()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for fetches on the tier's thread."""
        with self._changed:
            assert self._changed.wait_for(is_so, 30)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a sequence would find blocks; fetches hold some."""
        return self.blocks.num_allocatable >= num_blocks * self.blocks.num_groups

    @staticmethod
    def hashes(tokens: list[int]) -> list[bytes]:
        return HashChain(b"model", BLOCK).hashes(tokens, len(tokens) // BLOCK)

    def content(self, group: int, block_hash: bytes) -> torch.Tensor:
        random_bytes = random.Random(block_hash + bytes([group])).randbytes(self.pool.block_nbytes)
        return torch.frombuffer(bytearray(random_bytes), dtype=torch.uint8).to(self.pool.blocks.device)

    def compute(self, tokens: list[int], source: str | None = None) -> int:
        """A sequence of these tokens comes and goes. Returns its cached blocks, whose bytes are compared."""
        self._num_sequences += 1
        owner, hashes = sequence_owner((str(self._num_sequences), 1)), self.hashes(tokens)
        allocation = self.blocks.allocate(owner, len(hashes), hashes, is_whole=True)
        assert allocation is not None
        if source is not None:
            self.blocks.came_from(owner, source)
        self.pool.order_steps()  # a step is launched
        for group in range(self.blocks.num_groups):
            owned = self.blocks.owned_blocks(owner, group)
            for index, (block_id, block_hash) in enumerate(zip(owned, hashes, strict=True)):
                if block_id is None:
                    continue
                content = self.content(group, block_hash)
                if index < allocation.num_cached:
                    assert torch.equal(self.pool.blocks[block_id], content), f"block {index} of group {group}"
                else:
                    self.pool.blocks[block_id] = content
        if self.pool.blocks.is_cuda:
            torch.cuda.synchronize()  # the step has returned
        for index in range(allocation.num_cached, len(hashes)):
            self.blocks.publish(owner, index, hashes[index])
        self.blocks.release(owner)
        return allocation.num_cached

    def work(self) -> None:
        while self.tier.work():
            pass

    def fetch(self, tokens: list[int]) -> Fetch | None:
        """Fetch what a prompt of these tokens and one more begins with, and let it come."""
        fetch = self.tier.fetch(self.hashes(tokens))
        self.work()
        return fetch

    def check(self) -> None:
        self.blocks.check_integrity()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, f"somebody still holds blocks: {ledger}"
        self.tier.check_integrity()


def tokens_of(text: int, num_blocks: int) -> list[int]:
    return [1000 * text + position for position in range(num_blocks * BLOCK)]
