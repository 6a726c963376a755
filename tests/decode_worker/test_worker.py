"""The assembled decode worker's health: dead sockets are reported as a reason to restart, and the worker still stops."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.errors import WireError
from kvrelay.wire.lines.block_sender import BlockSender, SendTicket
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.sender import SharedTarget
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.worker.setup import Setup

WAIT_S = 30.0


def decode_worker(place: SharedPlace | None = None) -> DecodeWorker:
    anywhere, network = "tcp://127.0.0.1:*", Network.open()
    setup = Setup("decode", 1, anywhere, CollectorRegistry(), network, shared_memory=place)
    return DecodeWorker(FakeEngine(fake_card()), DecodeSchedulerSettings(), anywhere, setup)


async def test_a_dead_control_socket_is_a_reason_to_restart() -> None:
    worker = decode_worker()
    await worker.start()
    assert worker.not_live() == worker.not_ready() == []
    await worker._server.stop()
    assert worker.not_live() == worker.not_ready() == ["the control socket is dead"]
    await worker.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_kv_port_is_a_reason_to_restart_and_stops_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = decode_worker()
    died = threading.Event()

    def begin_piece(header: BlockHeader) -> None:
        died.set()
        raise RuntimeError("nobody expects that")

    monkeypatch.setattr(worker.leases, "begin_piece", begin_piece)
    await worker.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = BlockSender(worker.data_address, metrics=WireMetrics(CollectorRegistry()), context=context)
    payload = memoryview(bytes(8))
    sender.send(BlockHeader(lease_id=1, epoch=1, block_index=0, payload_nbytes=8, block_hash=bytes(16)), payload)
    assert await asyncio.to_thread(died.wait, WAIT_S)
    await asyncio.to_thread(worker._receivers["the KV port"]._thread.join, WAIT_S)
    assert worker._receivers["the KV port"]._socket.closed, "senders would wait for a port that nobody reads"
    assert worker.not_live() == worker.not_ready() == ["the KV port is dead"]
    sender.close()
    sender.join()
    await asyncio.to_thread(context.term)
    async with asyncio.timeout(WAIT_S):
        await worker.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_receiver_of_shared_memory_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of shared memory dies. Liveness reports it, and its sender ends instead of waiting for slots."""
    worker = decode_worker(SharedPlace())

    def begin_piece(header: BlockHeader) -> None:
        raise RuntimeError("nobody expects that")

    monkeypatch.setattr(worker.leases, "begin_piece", begin_piece)
    await worker.start()
    assert worker.not_live() == worker.not_ready() == []
    receiver = worker._receivers["the shared memory's socket"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shared = SharedTarget(receiver.name, SharedPlace(), fake_card().block_nbytes)
    metrics = WireMetrics(CollectorRegistry())
    sender = BlockSender(worker.data_address, metrics=metrics, context=context, shared=shared)
    payload = memoryview(bytes(8))
    header = BlockHeader(lease_id=1, epoch=1, block_index=0, payload_nbytes=8, block_hash=bytes(16))
    tickets: list[SendTicket] = []
    with suppress(WireError):  # raised once the sender has noticed
        tickets.extend(sender.send(header, payload) for _ in range(100))
    await asyncio.to_thread(receiver._thread.join, WAIT_S)
    assert worker.not_live() == worker.not_ready() == ["the shared memory's socket is dead"]
    await asyncio.to_thread(sender._thread.join, WAIT_S)
    assert tickets
    assert all(ticket.is_done for ticket in tickets)
    assert not sender.is_alive
    sender.close()
    sender.join()
    await asyncio.to_thread(context.term)
    async with asyncio.timeout(WAIT_S):
        await worker.stop()
