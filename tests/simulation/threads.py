"""Stand-ins for workers' threads (block sender, block receiver, model loop) in virtual time. Each step takes a random time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from kvrelay.common.block_digests import digests_of
from kvrelay.common.clock import Clock
from kvrelay.common.late_bytes import LateBytes
from kvrelay.engine.step.interface import DeviceFailedError
from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.errors import BlockRefusedError, WireError
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.network import Network

from .clock import SimLoop, current_process
from .wires import SimContext, SimLoopSocket, Wires

_KERNEL_BLOCKS = 2  # blocks that the kernel takes although the connection is frozen


def sim_network(wires: Wires) -> Network:
    """Stands in for :meth:`kvrelay.wire.network.Network.open`, in the current process."""
    parts: Any = (SimContext(wires), SimLoopSocket, SimSender, SimReceiver)
    return Network(current_process().clock, *parts)


class SimSender:
    """Stands in for :class:`kvrelay.wire.lines.block_sender.BlockSender`: packs, reads and releases a block at different moments.

    Its connection can break or freeze while both ends and the control link live. When it breaks, blocks on their way are lost, and
    the sender soon notices and ends.
    """

    def __init__(
        self, address: str, *, metrics: Any, context: SimContext, on_end: Callable[[], object] | None = None, **_: Any
    ) -> None:
        self.address = address
        self.process = current_process()
        self.is_frozen = False
        self._wires = context.wires
        self._on_end = on_end
        self._jobs: deque[tuple[Any, ...]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._has_ended = False
        self._generation = 0  # of the connection
        self._held: list[tuple[bytes, bytes]] = []  # blocks in the kernel while the connection is frozen
        self._stuck: tuple[bytes, bytes | None] | None = None  # the block that the kernel has no room for
        self._arrives_s = 0.0
        self._wires.senders.append(self)

    def send(self, header: Any, payload: memoryview | LateBytes, sealer: Any = None) -> SendTicket:
        """See BlockSender."""
        assert not self._is_closed, "a block for a link that is closed"
        if self._has_ended:
            raise WireError("this block sender is closed: its decode worker is lost")
        if sealer is not None:
            sealer.claim(header)
        ticket = SendTicket()
        self._jobs.append((ticket, header, payload, sealer, _bytes_of(payload)))
        if not self._is_busy:
            self._is_busy = True
            self._later(self._pack)
        return ticket

    @property
    def is_alive(self) -> bool:
        """See BlockSender."""
        return not self._is_closed and not self._has_ended

    def give_up(self) -> None:
        """See BlockSender."""
        if self.is_alive:
            self._has_ended = True
            self._later(self._end)

    def close(self) -> None:
        """See BlockSender."""
        self._is_closed = True
        self._end_queued()
        if self in self._wires.senders:
            self._wires.senders.remove(self)

    def join(self) -> None:
        """See BlockSender. There is no thread."""

    # -- what the network does -------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """The connection breaks, and blocks on their way are lost. The sender notices it soon."""
        self._generation += 1
        self._held.clear()
        self.thaw()
        self.on_peer_gone()

    def on_peer_gone(self) -> None:
        """The receiver has closed the connection, and the sender notices it soon.

        Blocks on their way reach the next receiver at this address, if there is one.
        """
        when_s = self._wires.loop.now_s + self._wires.delay_s()
        self._wires.loop.call_at(when_s, self._hear, context=self.process.context)

    def freeze(self) -> None:
        """No block gets through, and neither end notices it."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Held blocks arrive, and the next blocks leave."""
        self.is_frozen = False
        held, self._held = self._held, []
        for header, data in held:
            self._leave(header, data)
        stuck, self._stuck = self._stuck, None
        if stuck is not None:
            self._later(self._read, *stuck)

    def _hear(self) -> None:
        """The sender notices that its connection broke, and ends."""
        if self.is_alive:
            self._has_ended = True
            self._end()

    def _end(self) -> None:
        self._end_queued()
        if self._on_end is not None and not self._is_closed:
            self._on_end()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _end_queued(self) -> None:
        while self._jobs:
            self._jobs.popleft()[0].end()

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        delay_s = self._wires.loop.random.uniform(0, self._wires.send_s)
        self._wires.loop.call_at(self._wires.loop.now_s + delay_s, call, *args, context=self.process.context)

    def _pack(self) -> None:
        while self._jobs and not self._jobs[0][0].take():
            self._jobs.popleft()
        if not self.is_alive or not self._jobs:
            self._is_busy = False
            return
        _, header, late, sealer, _ = self._jobs[0]
        payload = memoryview(_bytes_of(late))
        if sealer is None:
            self._later(self._read, header.pack(digests_of(payload)), None)
        else:
            sealed = bytearray(len(payload) + TAG_NBYTES)
            self._later(self._read, sealer.seal(header, payload, memoryview(sealed)), bytes(sealed))

    def _read(self, header: bytes, sealed: bytes | None) -> None:
        """The kernel takes the bytes."""
        if not self.is_alive:
            return
        if self.is_frozen and len(self._held) >= _KERNEL_BLOCKS:
            self._stuck = (header, sealed)
            return
        ticket, _, late, _, promised = self._jobs.popleft()
        payload = _bytes_of(late)
        if payload != promised:
            self._wires.loop.problems.append(f"a block's memory changed while {self.process.name} was sending it")
        data = payload if sealed is None else sealed
        ticket.end()
        wires, chance = self._wires, self._wires.loop.random
        if chance.random() < wires.hostility.flip:
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            data = bytes(flipped)
        if chance.random() >= wires.hostility.drop:
            for _ in range(2 if chance.random() < wires.hostility.double else 1):
                self._leave(header, data)
        if self._jobs:
            self._later(self._pack)
        else:
            self._is_busy = False

    def _leave(self, header: bytes, data: bytes) -> None:
        """Put a block on its way."""
        if self.is_frozen:
            self._held.append((header, data))
            return
        wires = self._wires
        arrives_s = wires.loop.now_s + wires.delay_s()
        if wires.loop.random.random() >= wires.hostility.reorder:
            arrives_s = self._arrives_s = max(arrives_s, self._arrives_s + 1e-9)
        # In no process's context: the network goes on when the sender's process stops or ends.
        wires.loop.call_at(arrives_s, self._arrive, self._generation, header, data, context=contextvars.Context())

    def _arrive(self, generation: int, header: bytes, data: bytes) -> None:
        """The receiver that listens at the address now gets the block."""
        if generation != self._generation:
            return
        if self.is_frozen:
            self._held.append((header, data))
        elif (receiver := self._wires.receivers.get(self.address)) is not None:
            receiver.process.loop.call_soon(receiver.take, header, data, context=receiver.process.context)


def _bytes_of(payload: memoryview | LateBytes) -> bytes:
    """The present bytes of a block, gathered from all ranks if there are several."""
    if isinstance(payload, memoryview):
        return bytes(payload)
    found = payload.wait(SendTicket(), 0)
    assert found is not None, "memory is never scarce here"
    return bytes(found)


class SimReceiver:
    """Stands in for :class:`kvrelay.wire.lines.data_plane.BlockReceiver`. A write takes time, in which other events may happen."""

    def __init__(
        self,
        address: str,
        leases: LeaseTable,
        block_nbytes: int,
        *,
        context: SimContext,
        gate: None = None,
    ) -> None:
        self.address = address
        self.process = current_process()
        self._leases = leases
        self._wires = context.wires
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._is_busy = False
        self.is_alive = True

    def start(self) -> None:
        """Begin to receive."""
        self._wires.receivers[self.address] = self

    def stop(self) -> None:
        """Receive no more."""
        self.is_alive = False
        if self._wires.receivers.get(self.address) is self:
            self._wires.end_receiver(self.address)

    def take(self, header: bytes, data: bytes) -> None:
        """Called when a block arrives."""
        self._inbox.append((header, data))
        if not self._is_busy:
            self._is_busy = True
            self._begin()

    def _begin(self) -> None:
        while self._inbox and self.is_alive:
            frame, data = self._inbox.popleft()
            try:
                header = parse_header(frame)
                self._leases.begin_piece(header)
            except BlockRefusedError as error:
                if error.cause_name == "bad_header":
                    self._leases.count_bad_header()
                continue
            delay_s = self._wires.loop.random.uniform(0, self._wires.receive_s)
            self._wires.loop.call_at(self._wires.loop.now_s + delay_s, self._finish, header, data)
            return
        self._is_busy = False

    def _finish(self, header: Any, data: bytes) -> None:
        with contextlib.suppress(BlockRefusedError):  # counted by the table
            self._leases.write_piece(header, memoryview(data))()
        self._begin()


class SimModelLoop:
    """Stands in for :class:`kvrelay.worker.loop.ModelLoop`: steps take virtual time.

    A random time passes before each step. An engine with a pace adds its own time (``Process.ahead_s``). A command or a step that
    fails is a problem of the world, unless the device has failed.
    """

    def __init__(self, worker: Any, name: str, clock: Clock) -> None:
        self._worker = worker
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    def post(self, command: Any) -> None:
        """See ModelLoop."""
        self._inbox.append(command)
        self._news.set()

    def wake(self) -> None:
        """See ModelLoop."""
        self._news.set()

    @property
    def is_alive(self) -> bool:
        """See ModelLoop."""
        return self._task is not None and not self._task.done()

    def stop(self) -> bool:
        """See ModelLoop."""
        if self._task is not None:
            self._task.cancel()
        return True

    async def _run(self) -> None:
        loop, process = cast(SimLoop, asyncio.get_running_loop()), current_process()
        could_compute = True
        while True:
            if not (could_compute and self._worker.has_work()):
                await self._news.wait()
            self._news.clear()
            await asyncio.sleep(loop.random.uniform(0, loop.step_s))
            while self._inbox:
                command = self._inbox.popleft()
                try:
                    self._worker.handle(command)
                except Exception as error:
                    loop.problems.append(f"{process.name}: {command} failed: {error!r}")
                    self._worker.on_command_failed(command, error)
            could_compute = True
            if self._worker.has_work():
                failed: Exception | None = None
                try:
                    could_compute = self._worker.step()
                except Exception as error:
                    if not isinstance(error, DeviceFailedError):
                        loop.problems.append(f"{process.name}: a step failed: {error!r}")
                    failed = error
                step_s, process.ahead_s = process.ahead_s, 0.0
                if step_s > 0:
                    await asyncio.sleep(step_s)
                    process.end_step()
                if failed is not None:
                    try:
                        self._worker.on_step_failed(failed)
                    except DeviceFailedError:
                        return  # the thread ends
