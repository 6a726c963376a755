"""Copies of the pool's published blocks to the host's memory, in the background.

A copy does not hold its block. It counts only if the block stayed published until its end: before the pool takes a block for
another content, ``on_unpublished`` closes the read and marks the copy as void. So copies never delay a sequence. If they cannot
keep up, blocks leave the pool before their turn, and are not kept. The queue cannot be longer than the pool::

    published ─▶ queued ─▶ under way ─▶ kept, with the digests of what was copied
                    └──────────┴─ unpublished: missed

A void copy still uses its slot until it is over. Whatever it read then is thrown away.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvrelay.common.block_digests import copied, copy_bytes
from kvrelay.common.late_bytes import LateBytes
from kvrelay.engine.kv.host.blocks import HostBlock, HostBlocks
from kvrelay.engine.step.interface import BlockStore

COPIES_AT_ONCE = 4  # enough that the device need not wait; few enough that a hand-off's block waits for them
_SLOT_S = 1.0  # longest wait for a slot of staging; then the block is not kept


class _Wanted(NamedTuple):
    """A published block that is to be copied."""

    group: int
    block_hash: bytes
    sources: frozenset[str]


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy out of the pool. Implements :class:`kvrelay.common.late_bytes.Reader` for the block's bytes."""

    block_id: int
    block: HostBlock  # to fill
    content: memoryview | LateBytes
    is_void: bool = False  # the pool's block may have changed since the copy began, and its read is closed
    is_done: bool = False


class CopiesOut:
    """What is queued and under way. One thread calls ``work``; the other methods need the lock, except ``check_integrity``."""

    def __init__(
        self, store: BlockStore, kept: HostBlocks, lock: threading.Condition, tell: Callable[[str, int], None]
    ) -> None:
        """``lock``: guards ``kept``, too. ``tell``: called with "kept" or "missed", and a number of blocks."""
        self._store = store
        self._kept = kept
        self._lock = lock
        self._tell = tell
        self._queue: OrderedDict[int, _Wanted] = OrderedDict()  # by block of the pool, the next one first
        self._under_way: dict[int, _Copy] = {}  # by block of the pool; only copies that are not void

    def __len__(self) -> int:
        return len(self._queue)

    def on_published(self, block_id: int, group: int, block_hash: bytes, sources: frozenset[str]) -> None:
        """See Watcher. Queues the block unless it is kept."""
        if block_hash not in self._kept.by_group[group]:
            self._queue[block_id] = _Wanted(group, block_hash, sources)

    def on_unpublished(self, block_id: int) -> None:
        """See Watcher. The block is not copied, or its copy does not count."""
        copy = self._under_way.pop(block_id, None)
        if copy is not None:
            copy.is_void = True
            self._store.close_read(block_id)
        if copy is not None or self._queue.pop(block_id, None) is not None:
            self._tell("missed", 1)

    def clear(self) -> None:
        """Copy nothing more. Copies under way go on."""
        self._queue.clear()

    def work(self) -> bool:
        """Copy the next few blocks. False if none is queued. Raises RuntimeError if the device, or a rank, has failed."""
        begun: list[tuple[_Copy, Callable[[], bytes | None]]] = []
        while len(begun) < COPIES_AT_ONCE and (copy := self._open_next()) is not None:
            begun.append((copy, _begin(copy)))
        failed: list[RuntimeError] = []
        for copy, wait in begun:  # all of them, because a copy uses its slot until it is over
            try:
                self._finish(copy, wait)
            except RuntimeError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return bool(begun)

    def check_integrity(self) -> None:
        """Assert that every slot is in one state. On the thread that calls ``work``, while nothing is lent."""
        with self._lock:
            assert not self._under_way, f"{sorted(self._under_way)} are open, but nothing is copied"
            self._kept.check_integrity()

    def _open_next(self) -> _Copy | None:
        with self._lock:
            while self._queue:
                block_id, wanted = self._queue.popitem(last=False)
                block = self._kept.open(*wanted)
                if block is not None:
                    # Under the lock: it is still published, so ``on_unpublished`` will close the read.
                    copy = _Copy(block_id, block, self._store.open_read(block_id, wanted.group))
                    self._under_way[block_id] = copy
                    return copy
                self._tell("missed", 1)
        return None

    def _finish(self, copy: _Copy, wait: Callable[[], bytes | None]) -> None:
        digests = None
        try:
            digests = wait()
        except ValueError:
            if not copy.is_void:  # otherwise the read was closed
                raise
        finally:
            copy.is_done = True
            with self._lock:
                if not copy.is_void:
                    del self._under_way[copy.block_id]
                    self._store.close_read(copy.block_id)
                if copy.is_void or digests is None:
                    self._kept.abandon(copy.block)
                else:
                    self._kept.keep(copy.block, digests)
                if not copy.is_void:  # otherwise it was told already
                    self._tell("missed" if digests is None else "kept", 1)


def _begin(copy: _Copy) -> Callable[[], bytes | None]:
    """Begin to copy. The result ends it, and returns the digests; None if there was no memory to copy through."""
    content, target = copy.content, copy.block.memory
    if isinstance(content, memoryview):
        return partial(copied, content[: len(target)], target)
    try:
        return content.begin_copy_to(target) or partial(_copy_staged, copy, content)
    except (RuntimeError, ValueError) as error:
        return partial(_raise, error)


def _copy_staged(copy: _Copy, content: LateBytes) -> bytes | None:
    """Copy a block through staging. Returns its digests, or None if no slot came free in time."""
    target = copy.block.memory
    if (source := content.wait(copy, _SLOT_S)) is None:
        return None
    source = source[: len(target)]
    if (digests := content.digests(len(target))) is None:
        return copied(source, target)
    copy_bytes(source, target)
    return digests


def _raise(error: Exception) -> bytes:
    raise error
