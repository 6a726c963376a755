"""Data sockets by themselves: when a ticket is done, what closing guarantees, how the receiver starts and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.send_job import SendTicket, Wakeup
from kvrelay.wire.errors import WireError
from kvrelay.wire.lines.data_plane import BlockReceiver, TcpLine
from kvrelay.wire.metrics import WireMetrics

from ..lease_bench import WAIT_S, until
from ..rig import Rig
from ..sending import NOWHERE, Sending, assert_all_done_soon, header_for

BIG_NBYTES = 4 * 2**20


Make = Callable[..., Sending]


def bound(peer: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.parametrize("nbytes", [1, 512, BIG_NBYTES])
def test_the_ticket_is_done_when_the_block_is_out(sending: Make, peer: Any, num_sockets: int, nbytes: int) -> None:
    tickets = sending(bound(peer), num_sockets=num_sockets).send(nbytes=nbytes)
    assert peer.poll(WAIT_S * 1000)
    _, packed, received = peer.recv_multipart()
    assert received == b"k" * nbytes
    payload = memoryview(received)
    assert parse_header(packed).checksum == header_for(payload).checksum_of(payload)
    assert_all_done_soon(tickets)


@pytest.mark.parametrize("address", [NOWHERE, "ipc:///tmp/kvrelay-nobody-listens-here"])
@pytest.mark.parametrize("nbytes", [1, BIG_NBYTES])
def test_closing_fences_off_a_peer_that_never_existed(
    sending: Make, num_sockets: int, address: str, nbytes: int
) -> None:
    prefill = sending(address, num_sockets=num_sockets)
    tickets = prefill.send(20, nbytes)
    assert not any(ticket.is_done for ticket in tickets)
    prefill.sender.close()
    assert_all_done_soon(tickets)
    with pytest.raises(WireError, match="closed"):
        prefill.send()
    assert not prefill.has_told.is_set()


def test_closing_fences_off_a_peer_that_does_not_read(sending: Make, peer: Any, num_sockets: int) -> None:
    """The connection stands, its buffers are full, a block is half sent."""
    prefill = sending(bound(peer), num_sockets=num_sockets)
    tickets = prefill.send(50, BIG_NBYTES)
    assert peer.poll(WAIT_S * 1000)  # traffic flows
    assert not tickets[-1].is_done
    prefill.sender.close()
    assert_all_done_soon(tickets)


def test_one_of_several_lines_takes_no_blocks_before_it_is_connected(context: Any) -> None:
    """What it would hold up meanwhile, a line that is connected can send."""
    wakeup = Wakeup()
    for num_lines, has_room in ((1, True), (3, False)):
        line = TcpLine(
            NOWHERE,
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
    sending: Make, peer: Any, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = sending(bound(peer), num_sockets=num_sockets)
    break_once(monkeypatch, zmq.Again())
    tickets = prefill.send(3)
    came: set[int] = set()
    for _ in tickets:
        assert peer.poll(WAIT_S * 1000)
        came.add(parse_header(peer.recv_multipart()[1]).block_index)
    assert came == {0, 1, 2}
    assert_all_done_soon(tickets)


def test_a_thread_that_dies_leaves_no_block_held(
    sending: Make, peer: Any, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its prefill worker would hold them for ever, and offer every further request to the same dead end."""
    break_once(monkeypatch, OSError("broken"))
    prefill = sending(bound(peer), num_sockets=num_sockets)
    tickets: list[SendTicket] = []

    def has_ended() -> bool:
        with contextlib.suppress(WireError):
            tickets.extend(prefill.send())
        return not prefill.sender.is_alive

    until(has_ended, "the sender's end")
    prefill.assert_ends(tickets)
    with pytest.raises(WireError):
        prefill.send()
