"""A block that is read from a GPU's pool, and the slot that it is copied to.

:mod:`kvrelay.engine.kv.device.staging` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvrelay.common.late_bytes import Reader
from kvrelay.engine.kv.device.copies import Copied

if TYPE_CHECKING:
    from kvrelay.engine.kv.device.staging import Staging


@dataclass(frozen=True, slots=True)
class LaunchedCopy:
    """A copy to or from a slot."""

    number: int  # in the order of launches
    copied: Copied


@dataclass(slots=True, eq=False)
class Slot:
    """Pinned memory for one block."""

    memory: torch.Tensor  # [block_nbytes] uint8, pinned
    last: LaunchedCopy | None = None  # the last copy from or to it


@dataclass(slots=True, eq=False)
class StagedRead:
    """A block's bytes on their way to the host. Made by ``Staging.open_read``. Its fields change only under the staging's lock.

    Without a slot it is new, or queued, or all its readers so far are done. With a slot it is copied ahead or, with readers, lent.
    """

    _staging: Staging
    block_id: int
    nbytes: int  # what the block's group uses of it
    num_open: int = 0
    slot: Slot | None = None
    readers: list[Reader] = field(default_factory=list)

    def begin(self) -> None:
        """See LateBytes."""
        self._staging.begin(self)

    def begin_copy_to(self, target: memoryview) -> Callable[[], bytes] | None:
        """See LateBytes."""
        return self._staging.begin_copy_to(self, target)

    def digests(self, nbytes: int) -> bytes | None:
        """See LateBytes."""
        assert nbytes == self.nbytes, f"block {self.block_id} has {self.nbytes} bytes, not {nbytes}"
        return self._staging.digests(self)

    def wait(self, reader: Reader, timeout_s: float) -> memoryview | None:
        """The block's bytes (flat), which do not change until ``reader`` is done; None if no slot came free in time.

        Call it on the reading thread; ``reader`` must not be done before. Raises RuntimeError if the copy failed, ValueError if the
        read is closed.
        """
        return self._staging.wait(self, reader, timeout_s)

    def check_open(self) -> None:
        """Raise ValueError unless somebody holds it open."""
        if self.num_open == 0:
            raise ValueError(f"block {self.block_id} is read, but is not open")

    @property
    def is_scarce(self) -> bool:
        """See kvrelay.common.late_bytes.LateBytes: more than a quarter of the slots are lent, including this one."""
        return self._staging.lends_much()
