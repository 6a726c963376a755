"""What workers have threads for (sending and receiving blocks, the model), in virtual time: each step at a moment of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from kvrelay.wire.block_frames import parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.seal import TAG_NBYTES
from kvrelay.wire.send_job import SendTicket

from .clock import SimLoop, current_process
from .wires import SimContext


class SimSender:
    """For :class:`kvrelay.wire.block_sender.BlockSender`: packs, reads and lets go of each block at different moments."""

    def __init__(self, address: str, *, metrics: Any, context: SimContext, **_: Any) -> None:
        self._address = address
        self._wires = context.wires
        self._process = current_process()
        self._jobs: deque[tuple[Any, ...]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._arrives_s = 0.0

    def send(self, header: Any, payload: memoryview, sealer: Any = None) -> SendTicket:
        """See BlockSender."""
        assert not self._is_closed, "a block for a link that is closed"
        if sealer is not None:
            sealer.claim(header.block_index)
        ticket = SendTicket()
        self._jobs.append((ticket, header, payload, sealer, bytes(payload)))
        if not self._is_busy:
            self._is_busy = True
            self._later(self._pack)
        return ticket

    @property
    def is_alive(self) -> bool:
        """See BlockSender."""
        return not self._is_closed

    def close(self) -> None:
        """See BlockSender."""
        self._is_closed = True
        while self._jobs:
            self._jobs.popleft()[0].end()

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        delay_s = self._wires.loop.random.uniform(0, self._wires.send_s)
        self._wires.loop.call_at(self._wires.loop.now_s + delay_s, call, *args, context=self._process.context)

    def _pack(self) -> None:
        while self._jobs and not self._jobs[0][0].take():
            self._jobs.popleft()
        if self._is_closed or not self._jobs:
            self._is_busy = False
            return
        _, header, payload, sealer, _ = self._jobs[0]
        if sealer is None:
            self._later(self._read, header.pack(payload), None)
        else:
            sealed = bytearray(len(payload) + TAG_NBYTES)
            self._later(self._read, sealer.seal(header, payload, memoryview(sealed)), bytes(sealed))

    def _read(self, header: bytes, sealed: bytes | None) -> None:
        """The kernel takes the bytes."""
        if self._is_closed:
            return
        ticket, _, payload, _, promised = self._jobs.popleft()
        if payload != promised:
            self._wires.problems.append(f"a block's memory changed while {self._process.name} was sending it")
        data = bytes(payload) if sealed is None else sealed
        ticket.end()
        wires, chance = self._wires, self._wires.loop.random
        if chance.random() < wires.hostility.flip:
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            data = bytes(flipped)
        if chance.random() >= wires.hostility.drop:
            for _ in range(2 if chance.random() < wires.hostility.double else 1):
                arrives_s = wires.loop.now_s + wires.delay_s()
                if chance.random() >= wires.hostility.reorder:
                    arrives_s = self._arrives_s = max(arrives_s, self._arrives_s + 1e-9)
                wires.loop.call_at(arrives_s, self._arrive, header, data)
        if self._jobs:
            self._later(self._pack)
        else:
            self._is_busy = False

    def _arrive(self, header: bytes, data: bytes) -> None:
        """Whoever listens there by now gets it."""
        if (receiver := self._wires.receivers.get(self._address)) is not None:
            receiver.process.loop.call_soon(receiver.take, header, data, context=receiver.process.context)


class SimReceiver:
    """For :class:`kvrelay.wire.data_plane.BlockReceiver`: the write of a block takes a moment, in which anything may happen."""

    def __init__(
        self,
        address: str,
        leases: LeaseTable,
        block_nbytes: int,
        *,
        context: SimContext,
        gate: None = None,
        num_threads: int = 1,
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
        """No more."""
        self.is_alive = False
        if self._wires.receivers.get(self.address) is self:
            del self._wires.receivers[self.address]

    def take(self, header: bytes, data: bytes) -> None:
        """A block has come."""
        self._inbox.append((header, data))
        if not self._is_busy:
            self._is_busy = True
            self._begin()

    def _begin(self) -> None:
        while self._inbox and self.is_alive:
            frame, data = self._inbox.popleft()
            try:
                header = parse_header(frame)
                self._leases.begin_block(header)
            except BlockRefusedError as error:
                if error.cause_name == "bad_header":
                    self._leases.count_bad_header()
                continue
            delay_s = self._wires.loop.random.uniform(0, 0.003)
            self._wires.loop.call_at(self._wires.loop.now_s + delay_s, self._finish, header, data)
            return
        self._is_busy = False

    def _finish(self, header: Any, data: bytes) -> None:
        with contextlib.suppress(BlockRefusedError):  # counted by the table
            self._leases.finish_block(header, memoryview(data))
        self._begin()


class SimModelLoop:
    """For :class:`kvrelay.engine.loop.ModelLoop`: steps take virtual time."""

    def __init__(self, worker: Any, name: str) -> None:
        self._worker = worker
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last_tick_s = 0.0

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
        loop = cast(SimLoop, asyncio.get_running_loop())
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
                    self._worker.on_command_failed(command, error)
            could_compute = True
            if self._worker.has_work():
                try:
                    could_compute = self._worker.step()
                except Exception as error:
                    self._worker.on_step_failed(error)
