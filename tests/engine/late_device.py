"""A device whose copies and digests happen as late as a GPU's may: when something waits for them, in the order of their launches.

With ``random`` some happen earlier, whenever the host calls the device. A copy reads its source when it happens, not
when it is launched. Anything not ordered after it reads the old bytes. Digests are of the block as it is then.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvrelay.common.block_digests import digests_of, num_stretches
from kvrelay.engine.kv.device.copies import Digests


class LateCopied:
    """The completion of one copy."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self._device = device
        self.number = number

    def query(self) -> bool:
        return self._device.reach(self.number, waits=False)

    def synchronize(self) -> None:
        self._device.reach(self.number, waits=True)


class LateDevice:
    """Implements :class:`kvrelay.engine.kv.device.copies.CopyDevice` over host memory. Steps run at once."""

    def __init__(
        self,
        chance: random.Random | None = None,
        *,
        fails_at: int | None = None,
        hashes: bool = False,
        reaches: bool = False,
    ) -> None:
        """``fails_at``: the number, from 1, of the copy that breaks the device for good. ``hashes``: whether it makes digests.
        ``reaches``: whether it lets memory be registered.
        """
        self._chance = chance
        self._fails_at = fails_at
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, tuple[torch.Tensor, ...], Callable[[], object]]] = deque()
        self._hashes = hashes
        self._reaches = reaches
        self.registered: dict[int, int] = {}  # by address: how many bytes
        self.fails_to_digest = False  # copies are launched, and digests are not
        self.flips = False  # whether copies change a bit
        self.num_asked = 0  # calls of ``register``
        self.num_direct = 0  # copies from or to registered memory
        self._is_broken = False
        self.num_launched = 0
        self.num_digests = 0  # launches of these
        self.num_pinned = 0  # pieces of pinned memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LateCopied:
        assert target.shape == source.shape
        self.num_direct += any(
            start <= one.data_ptr() < start + nbytes
            for start, nbytes in self.registered.items()
            for one in (target, source)
        )
        return self._launch((target, source), lambda: self._copy(target, source))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        target[-1] ^= self.flips

    def can_digest(self, nbytes: int) -> bool:
        return self._hashes and nbytes % 8 == 0

    def digest(self, blocks: torch.Tensor, block_ids: Sequence[int], nbytes: int) -> Digests:
        if self.fails_to_digest:
            raise torch.OutOfMemoryError("no memory for digests")
        hashed = tuple(blocks[block_id, :nbytes] for block_id in block_ids)
        on_host = np.zeros((len(block_ids), num_stretches(nbytes)), dtype=np.int64)

        def make() -> None:
            for its, memory in zip(on_host, hashed, strict=True):
                its[:] = np.frombuffer(digests_of(memory.numpy().data), dtype=np.int64)

        self.num_digests += 1
        return Digests(self._launch(hashed, make), on_host)

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> bool:
        self.num_asked += 1
        if self._reaches:
            assert address % mmap.PAGESIZE == 0
            self.registered[address] = nbytes
        return self._reaches

    def unregister(self, address: int) -> None:
        with self._lock:
            assert self._is_broken or not any(
                address <= one.data_ptr() < address + self.registered[address]
                for _, memory, _ in self._pending
                for one in memory
            ), "a copy may still use it"
        del self.registered[address]

    def _launch(self, memory: tuple[torch.Tensor, ...], run: Callable[[], object]) -> LateCopied:
        with self._lock:
            self._check()
            self._drift()
            self.num_launched += 1
            self._pending.append((self.num_launched, memory, run))
            return LateCopied(self, self.num_launched)

    def hold_steps(self, copied: LateCopied) -> None:
        # A step runs on the host after this call. On a broken device it gives nothing, and waiting for it raises.
        with self._lock:
            self._run_to(copied.number)

    def reach(self, number: int, *, waits: bool) -> bool:
        with self._lock:
            self._check()
            if waits:
                self._run_to(number)
                self._check()
            else:
                self._drift()
            return not self._pending or self._pending[0][0] > number

    def uses(self, memory: torch.Tensor) -> bool:
        """Whether a pending copy reads or writes this memory, or pending digests are of it."""
        return any(memory.data_ptr() == one.data_ptr() for _, used, _ in self._pending for one in used)

    def _drift(self) -> None:
        if self._chance is not None and self._pending:
            self._run_to(self._pending[0][0] + self._chance.randrange(len(self._pending) + 1) - 1)

    def _run_to(self, number: int) -> None:
        while self._pending and self._pending[0][0] <= number and not self._is_broken:
            its_number, _, run = self._pending.popleft()
            self._is_broken = its_number == self._fails_at
            if not self._is_broken:
                run()

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("the device is broken")
