"""A device whose copies happen as late as a GPU's may: when something waits for them, in the order of their launches.

With ``random`` some happen earlier, whenever the host calls the device. A copy reads its source when it happens, not
when it is launched. Anything not ordered after it reads the old bytes.
"""

from __future__ import annotations

import random
import threading
from collections import deque

import torch


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
    """Implements :class:`kvrelay.engine.kv.copies.CopyDevice` over host memory. Steps run at once."""

    def __init__(self, chance: random.Random | None = None, *, fails_at: int | None = None) -> None:
        """``fails_at``: the number, from 1, of the copy that breaks the device for good."""
        self._chance = chance
        self._fails_at = fails_at
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._is_broken = False
        self.num_launched = 0
        self.num_pinned = 0  # pieces of pinned memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LateCopied:
        assert target.shape == source.shape
        with self._lock:
            self._check()
            self._drift()
            self.num_launched += 1
            self._pending.append((self.num_launched, target, source))
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
        """Whether a pending copy reads or writes this memory."""
        return any(memory.data_ptr() in (target.data_ptr(), source.data_ptr()) for _, target, source in self._pending)

    def _drift(self) -> None:
        if self._chance is not None and self._pending:
            self._run_to(self._pending[0][0] + self._chance.randrange(len(self._pending) + 1) - 1)

    def _run_to(self, number: int) -> None:
        while self._pending and self._pending[0][0] <= number and not self._is_broken:
            its_number, target, source = self._pending.popleft()
            self._is_broken = its_number == self._fails_at
            if not self._is_broken:
                target.copy_(source)

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("the device is broken")
