"""Whole blocks of a worker with several ranks, each of which has a part of the bytes. For senders and receivers.

On a CPU all parts are in memory of this process, or memory that a rank shares; on GPUs each is copied. A block is assembled when
its sender reads it. A received block is verified as a whole and then split. So steps see only verified blocks, as on a GPU
(:mod:`kvrelay.engine.kv.device.staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.common.block_digests import landed
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.late_bytes import Reader
from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.kv.division import BY_HEADS, Division
from kvrelay.engine.kv.fragments import Fragment, given, taken

Bytes = npt.NDArray[np.uint8]


class Part(Protocol):
    """One rank's pool. Both methods raise RuntimeError if the block cannot be copied. Use it on any thread."""

    def reading(self, block_id: int) -> AbstractContextManager[Bytes]:
        """A context with the rank's bytes of a block."""

    def writing(self, block_id: int) -> AbstractContextManager[Bytes]:
        """A context with memory to fill with all of the rank's bytes of a block. They are in the pool after the exit."""


class HostPart:
    """Implements Part over memory of this process."""

    def __init__(self, blocks: Bytes) -> None:
        """``blocks``: ``[num_blocks or more, bytes of the rank's part of a block]``."""
        self._blocks = blocks

    @contextmanager
    def reading(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        yield self._blocks[block_id]

    def writing(self, block_id: int) -> AbstractContextManager[Bytes]:
        """See Part."""
        return self.reading(block_id)


class GatheredStore:
    """Implements :class:`kvrelay.engine.step.interface.BlockStore` over the pools of all ranks."""

    register = None  # no device has whole blocks

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        parts: Sequence[Part],
        num_stages: int = 1,
        division: Division = BY_HEADS,
    ) -> None:
        """``geometry``: of the whole model. ``num_blocks``: physical ones. ``parts``: of all ranks, in order."""
        self.num_blocks = num_blocks
        self.block_nbytes = geometry.physical_nbytes
        cuts = cuts_of(len(parts) // num_stages, num_stages)
        groups = range(len(geometry.groups))

        def fragments(of: Callable[..., list[Fragment]], group: int) -> list[tuple[Part, list[Fragment]]]:
            pairs = zip(parts, cuts, strict=True)
            its = ((part, of(geometry, cut, group, division)) for part, cut in pairs)
            return [(part, found) for part, found in its if found]

        self._given = [fragments(given, group) for group in groups]
        self._taken = [fragments(taken, group) for group in groups]
        self._writes: dict[int, tuple[Bytes, int]] = {}  # by block: the memory, and the group

    def open_read(self, block_id: int, group: int) -> GatheredRead:
        """See BlockStore."""
        self._check(block_id)
        return GatheredRead(self, block_id, group)

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """See BlockStore. The digests are of the whole block, before it is split."""
        digests = landed(payload, self.open_write(block_id, group)[: len(payload)])
        self.close_write(block_id)
        return lambda: digests

    def open_write(self, block_id: int, group: int) -> memoryview:
        """See BlockStore. Raises ValueError if the block is open for writing already."""
        self._check(block_id)
        if block_id in self._writes:
            raise ValueError(f"block {block_id} is open for writing already")
        whole = np.empty(self.block_nbytes, dtype=np.uint8)
        self._writes[block_id] = whole, group
        return whole.data

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""
        whole, group = self._writes.pop(block_id)
        for part, fragments in self._taken[group]:
            with part.writing(block_id) as own:
                for one in fragments:
                    own[one.own_start : one.own_start + one.nbytes] = whole[one.start : one.start + one.nbytes]

    def gather(self, block_id: int, group: int) -> Bytes:
        """A group's block, assembled in new memory."""
        whole = np.zeros(self.block_nbytes, dtype=np.uint8)
        for part, fragments in self._given[group]:
            with part.reading(block_id) as own:
                for one in fragments:
                    whole[one.start : one.start + one.nbytes] = own[one.own_start : one.own_start + one.nbytes]
        return whole

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} of a pool of {self.num_blocks}")


@dataclass(frozen=True, slots=True)
class GatheredRead:
    """Implements :class:`kvrelay.common.late_bytes.LateBytes`. Each reader gets memory of its own."""

    _store: GatheredStore
    _block_id: int
    _group: int
    is_scarce: bool = False

    def begin(self) -> None:
        """See LateBytes: it is gathered when somebody waits."""

    def begin_copy_to(self, _target: memoryview) -> None:
        """See LateBytes: no rank has the whole block."""

    def wait(self, _reader: Reader, _timeout_s: float) -> memoryview:
        """See LateBytes."""
        return self._store.gather(self._block_id, self._group).data

    def digests(self, _nbytes: int) -> None:
        """See LateBytes: no rank has the whole block."""
