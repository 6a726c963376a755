"""Data sockets by themselves: when a ticket is done, what closing guarantees, how the receiver starts and ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.block_frames import BlockHeader, parse_header
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.data_plane import BlockReceiver, TcpLine
from kvrelay.wire.errors import WireError
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import SendTicket, Wakeup

from .lease_bench import WAIT_S, until
from .rig import Rig, assert_done_soon

BIG_NBYTES = 4 * 2**20


def header_for(payload: Any, index: int = 0) -> BlockHeader:
    return BlockHeader(lease_id=1, epoch=1, block_index=index, payload_nbytes=len(payload), block_hash=b"h" * 16)


def sender_to(context: Any, address: str, num_sockets: int = 1) -> BlockSender:
    return BlockSender(address, metrics=WireMetrics(CollectorRegistry()), context=context, num_sockets=num_sockets)


@pytest.mark.parametrize("nbytes", [1, 512, BIG_NBYTES])
def test_the_ticket_is_done_when_the_block_is_out(context: Any, num_sockets: int, nbytes: int) -> None:
    with context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        sender = sender_to(context, f"tcp://127.0.0.1:{port}", num_sockets)
        payload = memoryview(bytearray(b"k" * nbytes))
        ticket = sender.send(header_for(payload), payload)
        assert peer.poll(WAIT_S * 1000)
        _, packed, received = peer.recv_multipart()
        assert received == payload
        assert parse_header(packed).checksum == header_for(payload).checksum_of(payload)
        assert_done_soon(ticket)
        sender.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "ipc:///tmp/kvrelay-nobody-listens-here"])
@pytest.mark.parametrize("nbytes", [1, BIG_NBYTES])
def test_closing_fences_off_a_peer_that_never_existed(
    context: Any, num_sockets: int, address: str, nbytes: int
) -> None:
    sender = sender_to(context, address, num_sockets)
    payload = memoryview(bytearray(nbytes))
    tickets = [sender.send(header_for(payload), payload) for _ in range(20)]
    assert not any(ticket.is_done for ticket in tickets)
    sender.close()
    sender.close()
    for ticket in tickets:
        assert_done_soon(ticket)
    with pytest.raises(WireError, match="closed"):
        sender.send(header_for(payload), payload)


def test_closing_fences_off_a_peer_that_does_not_read(context: Any, num_sockets: int) -> None:
    """The connection stands, its buffers are full, a block is half sent."""
    with context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        peer.rcvhwm = 1
        peer.rcvbuf = 2**16
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        sender = sender_to(context, f"tcp://127.0.0.1:{port}", num_sockets)
        payload = memoryview(bytearray(BIG_NBYTES))
        tickets = [sender.send(header_for(payload), payload) for _ in range(50)]
        assert peer.poll(WAIT_S * 1000)  # traffic flows
        assert not tickets[-1].is_done
        sender.close()
        for ticket in tickets:
            assert_done_soon(ticket)


def test_one_of_several_lines_takes_no_blocks_before_it_is_connected(context: Any) -> None:
    """What it would hold up meanwhile, a line that is connected can send."""
    wakeup = Wakeup()
    for num_lines, has_room in ((1, True), (3, False)):
        line = TcpLine(
            "tcp://127.0.0.1:9",
            metrics=WireMetrics(CollectorRegistry()),
            context=context,
            wakeup=wakeup,
            num_lines=num_lines,
        )
        assert bool(int(line._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT) is has_room
        line.close()
    wakeup.close()


def test_a_taken_data_address_is_a_clear_error(one_rig: Rig) -> None:
    with pytest.raises(WireError, match="cannot listen for KV blocks"):
        BlockReceiver(one_rig.receiver.address, one_rig.table, 512, context=one_rig.context)


def test_a_receiver_that_never_started_stops(one_rig: Rig) -> None:
    receiver = BlockReceiver("tcp://127.0.0.1:0", one_rig.table, 512, context=one_rig.context)
    assert not receiver.is_alive
    receiver.stop()
    receiver.stop()


def test_a_socket_file_that_another_process_took_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_text("mine")
    file = SocketFile(f"ipc://{path}")
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "other").rename(path)
    file.remove()
    assert path.read_text() == "theirs"
    own = SocketFile(f"ipc://{path}")
    own.remove()
    own.remove()  # gone already
    assert not path.exists()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:80", "ipc://@abstract"])
def test_an_endpoint_without_a_file_has_nothing_to_remove(endpoint: str) -> None:
    SocketFile(endpoint).remove()


def break_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The next line that sends says before that it has room, and its connection breaks before it is used."""
    errors = [error]
    send = zmq.Socket.send

    def fail_first(socket: Any, *arguments: Any, **options: Any) -> Any:
        if socket.type == zmq.DEALER and errors:
            raise errors.pop()
        return send(socket, *arguments, **options)

    monkeypatch.setattr(zmq.Socket, "send", fail_first)


def test_a_connection_that_breaks_between_asking_and_sending_costs_no_block(
    context: Any, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        sender = sender_to(context, f"tcp://127.0.0.1:{port}", num_sockets)
        break_once(monkeypatch, zmq.Again())
        payloads = [memoryview(bytes([number]) * 100) for number in range(3)]
        tickets = [sender.send(header_for(payload, index), payload) for index, payload in enumerate(payloads)]
        came: list[bytes] = []
        for _ in payloads:
            assert peer.poll(WAIT_S * 1000)
            came.append(peer.recv_multipart()[2])
        assert sorted(came) == sorted(map(bytes, payloads))
        for ticket in tickets:
            assert_done_soon(ticket)
        sender.close()


def test_a_thread_that_dies_leaves_no_block_held(
    context: Any, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its prefill worker would hold them for ever, and offer every further request to the same dead end."""
    break_once(monkeypatch, OSError("broken"))
    payload = memoryview(bytes(100))
    tickets: list[SendTicket] = []

    def has_ended() -> bool:
        with contextlib.suppress(WireError):
            tickets.append(sender.send(header_for(payload), payload))
        return not sender.is_alive

    with context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        sender = sender_to(context, f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}", num_sockets)
        until(has_ended, "the sender's end")
        for ticket in tickets:
            assert_done_soon(ticket)
        with pytest.raises(WireError):
            sender.send(header_for(payload), payload)
        sender.close()
