"""Moves blocks between a GPU's KV pool and the threads that ship and receive them: a bounded number of pinned buffers, with copies
beside the steps.

A **slot** is pinned memory for one block; all are allocated at the start. Copies run in the order of their launches
(:mod:`kvrelay.engine.kv.device.copies`), so no copy meets a slot or a block that an earlier one still uses. This module orders
what the *host* reads or writes in a slot, and what *steps* compute, after the copies::

    read    open_read ─▶ begin: queued ─▶ copied ahead, on half of the slots ─▶ wait: lent until the reader is done ─▶ close_read
    write   open_write: a slot whose last copy is over ─▶ filled, proved ─▶ close_write: copied ─▶ order_steps, before a step

A device that can hash makes the digests of blocks that are not sealed, from the block in the pool
(:mod:`kvrelay.engine.kv.device.late_digests`). Copies from and to memory that is registered with it
(:mod:`kvrelay.engine.kv.device.registered`) go there directly: ``StagedRead.begin_copy_to`` and ``begin_write``.

Opening, beginning and closing a read neither waits nor launches anything. Call ``StagedRead.wait`` on a sender's thread: it waits
for the block's copy and, if the block has no slot, for a slot. Half of the slots are reserved for such waits, so that blocks for a
decode worker that does not read delay no others. The network decides when readers are done, so some take long. Such readers keep at
most a quarter of the slots: above that, ``StagedRead.is_scarce`` asks them to copy the bytes elsewhere. So some slots always become
free soon.

Call ``begin_write`` and ``open_write`` on a receiver's thread. They wait for the oldest copy, some tens of microseconds. If there
are more threads than slots, they wait for another thread's block to be verified; that is the backpressure.

A step may read a block as soon as ``close_write`` has returned, because ``order_steps`` makes the *device* wait for the last copy
so far. That is seldom more than one copy, because blocks arrive no faster than the host can verify them. It also orders a step
after the copy of a block whose read was closed early. Whoever waits for a block's digests has waited for its copy.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import torch

from kvrelay.common.block_digests import copy_bytes, landed
from kvrelay.common.errors import ModelError
from kvrelay.common.late_bytes import Reader
from kvrelay.engine.kv.device.copies import Copied, CopyDevice, StagingPlan
from kvrelay.engine.kv.device.late_digests import LateDigests
from kvrelay.engine.kv.device.registered import RegisteredMemory
from kvrelay.engine.kv.device.staged_read import LaunchedCopy, Slot, StagedRead

_DEFAULT_NBYTES = 2**28
_MIN_SLOTS = 4  # two threads of receivers or senders, and a next slot for each
_LOOK_S = 0.001  # readers do not report when they are done
_AHEAD_AT_ONCE = 4  # copies ahead that a thread launches before it waits for its own


def pinned_pieces(num_slots: int, slot_nbytes: int) -> list[int]:
    """``num_slots`` split into pieces that are pinned one by one. torch rounds each up to a power of two, and 300 MiB would take
    512.

    Each piece is slightly less than a power of two, so together they take hardly more than the slots.
    """
    pieces: list[int] = []
    while num_slots > 0:
        power = 1 << ((num_slots * slot_nbytes).bit_length() - 1)
        pieces.append(max(1, power // slot_nbytes))
        num_slots -= pieces[-1]
    return pieces


class Staging:
    """The slots of one pool. Thread-safe, except that only the model thread calls ``order_steps``."""

    def __init__(self, blocks: torch.Tensor, plan: StagingPlan, group_nbytes: Sequence[int]) -> None:
        """``blocks``: the pool's bytes, ``[num_blocks, block_nbytes]`` uint8, on ``plan.device``. ``group_nbytes``: what each group
        uses of its blocks.

        Raises ModelError if the plan's memory is too small, or cannot be pinned.
        """
        self._blocks = blocks
        self._device: CopyDevice = plan.device
        self._block_nbytes = blocks.shape[1]
        self.num_slots = max(_DEFAULT_NBYTES // self._block_nbytes, _MIN_SLOTS)
        if plan.nbytes is not None:
            self.num_slots = plan.nbytes // self._block_nbytes
        if self.num_slots < _MIN_SLOTS:
            raise ModelError(
                f"--staging-mb gives {self.num_slots} buffers of {self._block_nbytes / 2**20:.2f} MiB, a KV block each; at least "
                f"{_MIN_SLOTS} are needed: raise it to {-(-_MIN_SLOTS * self._block_nbytes // 2**20)}"
            )
        try:
            pieces = [
                plan.device.pinned(count * self._block_nbytes).view(count, -1)
                for count in pinned_pieces(self.num_slots, self._block_nbytes)
            ]
        except RuntimeError as error:
            raise ModelError(
                f"cannot pin {self.num_slots * self._block_nbytes / 2**20:.0f} MiB of host memory ({error}): lower --staging-mb"
            ) from error
        self._free = deque(Slot(slot) for piece in pieces for slot in piece)  # first in, first out
        self._changed = threading.Condition()
        self._reads: dict[int, StagedRead] = {}  # by block
        self._queued: OrderedDict[int, StagedRead] = OrderedDict()  # the next reads to copy ahead, in order
        self._num_ahead = 0  # reads with a slot and no reader yet
        self._lent: dict[StagedRead, None] = {}  # reads with a slot and readers
        self._num_waiting = 0  # threads that wait for a slot
        self._looked_s = 0.0  # when the lent slots were last checked, and too many were still in use
        self._writes: dict[int, Slot] = {}  # by block
        self._num_copies = 0
        self._unordered: LaunchedCopy | None = None  # a copy that the next step must follow
        self._hashes = all(map(plan.device.can_digest, group_nbytes))
        self._digests = LateDigests(plan.device, blocks, self._changed)
        self.registered = RegisteredMemory(plan.device) if self._hashes else None
        if self._hashes:
            plan.device.digest(blocks, [0], max(group_nbytes)).wait(0)  # compiles the kernel before blocks wait for it

    # -- reads -----------------------------------------------------------------------------------------------------

    def open_read(self, block_id: int, nbytes: int) -> StagedRead:
        """Open a block for readers, who share its copies. The step that computed it must have returned.

        ``nbytes``: what the block's group uses of it.
        """
        with self._changed:
            read = self._reads.get(block_id)
            if read is None:
                read = self._reads[block_id] = StagedRead(self, block_id, nbytes)
            read.num_open += 1
            return read

    def begin(self, read: StagedRead) -> None:
        """Let the next threads that wait bring the block to a slot, in turn."""
        with self._changed:
            if read.slot is None and read.num_open > 0:
                self._queued[read.block_id] = read

    def close_read(self, block_id: int) -> None:
        """End one ``open_read`` of the block. After the next ``order_steps``, steps may write to the block."""
        with self._changed:
            read = self._reads[block_id]
            read.num_open -= 1
            if read.num_open == 0:
                del self._reads[block_id]
                self._queued.pop(block_id, None)
                if read.slot is not None:
                    self._order_behind(read.slot)  # its copy may still run if no reader has waited for it
                    self._take_from(read)

    def wait(self, read: StagedRead, reader: Reader, timeout_s: float) -> memoryview | None:
        """See StagedRead."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            read.check_open()
            if not self._wait_for_slot(read, deadline_s):
                return None
            if read.slot is None:
                self._queued.pop(read.block_id, None)
                self._bring(read)
            elif not read.readers:
                self._num_ahead -= 1
            slot = read.slot
            assert slot is not None
            assert slot.last is not None
            copied = slot.last.copied
            read.readers.append(reader)
            self._lent[read] = None
            if not self._free and 4 * self._num_ahead < self.num_slots:
                self._reclaim()
            self._copy_ahead()
        copied.synchronize()  # each reader waits itself, and learns itself of a copy that failed
        return slot.memory.numpy().data

    def begin_copy_to(self, read: StagedRead, target: memoryview) -> Callable[[], bytes] | None:
        """See LateBytes."""
        memory = None if self.registered is None else self.registered.find(target)
        with self._changed:
            if memory is None or read.slot is not None:
                return None
            read.check_open()
            self._queued.pop(read.block_id, None)
            return self._digests.ask_behind(memory, self._blocks[read.block_id, : len(target)], read.block_id)

    def digests(self, read: StagedRead) -> bytes | None:
        """See LateBytes."""
        if not self._hashes:
            return None
        with self._changed:
            read.check_open()
            digests = self._digests.ask(read.block_id, read.nbytes)
        return digests()

    def lends_much(self) -> bool:
        """Whether readers hold more than a quarter of the slots, or did a moment ago."""
        with self._changed:
            now_s = time.monotonic()
            # Checked at most once per interval: each check looks at all lent slots, under the lock.
            if 4 * len(self._lent) > self.num_slots and now_s >= self._looked_s + _LOOK_S:
                self._reclaim()
                self._copy_ahead()
                self._looked_s = now_s if 4 * len(self._lent) > self.num_slots else 0.0
            return 4 * len(self._lent) > self.num_slots

    def _copy_ahead(self) -> None:
        """Give slots to a few of the next reads, up to half of all; none while a thread waits for one."""
        for _ in range(_AHEAD_AT_ONCE):
            if not self._queued or not self._free or self._num_waiting or 2 * self._num_ahead >= self.num_slots:
                break
            _, read = self._queued.popitem(last=False)
            with contextlib.suppress(RuntimeError):  # the reader that waits for it tries again, and gets the error
                self._bring(read)
                self._num_ahead += 1

    def _bring(self, read: StagedRead) -> None:
        slot = self._free.popleft()
        try:
            self._copy(slot, slot.memory, self._blocks[read.block_id])
        except BaseException:
            self._give(slot)
            raise
        read.slot = slot

    def _take_from(self, read: StagedRead) -> None:
        """Free the read's slot. No reader uses it, and copies that are still queued for it come before later ones."""
        assert read.slot is not None
        self._give(read.slot)
        read.slot = None
        if read.readers:
            del self._lent[read]
            read.readers.clear()
        else:
            self._num_ahead -= 1

    # -- writes ----------------------------------------------------------------------------------------------------

    def open_write(self, block_id: int) -> memoryview:
        """Memory (flat, of one block) to fill, which nothing else uses.

        Raises ValueError if the block is already open for writing.
        """
        with self._changed:
            self._wait_for_slot(None, math.inf)
            if block_id in self._writes:
                raise ValueError(f"block {block_id} is open for writing already")
            slot = self._writes[block_id] = self._free.popleft()
        if slot.last is not None:
            try:
                slot.last.copied.synchronize()
            except RuntimeError:
                with self._changed:
                    self._give(self._writes.pop(block_id))
                raise
        return slot.memory.numpy().data

    def close_write(self, block_id: int) -> None:
        """Copy the filled memory to its block. Steps after the next ``order_steps`` see it.

        Raises RuntimeError if it cannot be copied.
        """
        with self._changed:
            slot = self._writes.pop(block_id)
            try:
                self._copy(slot, self._blocks[block_id], slot.memory)
                self._order_behind(slot)
            finally:
                self._give(slot)

    def begin_write(self, block_id: int, payload: memoryview) -> Callable[[], bytes]:
        """See BlockStore. Raises ValueError if the block is open for writing."""
        source = None if self.registered is None else self.registered.find(payload)
        if source is not None:
            with self._changed:
                return self._digests.ask_behind(self._blocks[block_id, : len(payload)], source, block_id)
        view = self.open_write(block_id)[: len(payload)]
        if not self._hashes:
            digests = landed(payload, view)
            self.close_write(block_id)
            return lambda: digests
        copy_bytes(payload, view)
        with self._changed:
            self.close_write(block_id)
            return self._digests.ask(block_id, len(payload))

    # -- steps -----------------------------------------------------------------------------------------------------

    def order_steps(self) -> Copied | None:
        """Computation launched from now on runs after all closed writes, and after the copies of reads that were closed early.

        Returns the copy that it runs after, or None if all are over. After waiting for the step, check that copy for errors. Raises
        RuntimeError if a copy has failed; nothing may be computed then.
        """
        if self._unordered is None:  # without the lock, as at most steps
            return None
        with self._changed:
            copied = self._unordered.copied
            if copied.query():
                self._unordered = None
                return None
            self._device.hold_steps(copied)
            return copied  # the next step gets it again, so an error is not forgotten

    def _order_behind(self, slot: Slot) -> None:
        assert slot.last is not None
        if self._unordered is None or slot.last.number > self._unordered.number:
            self._unordered = slot.last

    # -- slots -----------------------------------------------------------------------------------------------------

    def _copy(self, slot: Slot, target: torch.Tensor, source: torch.Tensor) -> None:
        copied = self._device.copy(target, source)
        self._num_copies += 1
        slot.last = LaunchedCopy(self._num_copies, copied)

    def _wait_for_slot(self, read: StagedRead | None, deadline_s: float) -> bool:
        """Wait until a slot is free, or ``read`` has one. False after the deadline. Waiting threads come before copies ahead."""
        self._num_waiting += 1
        try:
            while read is None or read.slot is None:
                if not self._free:
                    self._reclaim()
                if self._free:
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, _LOOK_S))
            return True
        finally:
            self._num_waiting -= 1

    def _reclaim(self) -> None:
        """Take back the slots whose readers are done."""
        for read in [read for read in self._lent if all(reader.is_done for reader in read.readers)]:
            self._take_from(read)

    def _give(self, slot: Slot) -> None:
        self._free.append(slot)
        self._changed.notify_all()
