"""Data sockets: when a ticket is done, that closing releases all blocks, and how the receiver starts and ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrelay.common.block_digests import digests_of
from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.errors import WireError
from kvrelay.wire.lines.data_plane import BlockReceiver, read_ahead

from ...ipv6 import needs_ipv6
from ..lease_bench import BLOCK_SIZE, WAIT_S, until
from ..rig import Rig
from ..sending import NOWHERE, NeverThere, Sending, assert_all_done_soon, header_for

BIG_NBYTES = 4 * 2**20


Make = Callable[..., Sending]


def bound(peer: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.parametrize("nbytes", [1, 512, BIG_NBYTES])
def test_the_ticket_is_done_when_the_block_is_out(sending: Make, peer: Any, nbytes: int) -> None:
    tickets = sending(bound(peer)).send(nbytes=nbytes)
    assert peer.poll(WAIT_S * 1000)
    _, packed, received = peer.recv_multipart()
    assert received == b"k" * nbytes
    payload = memoryview(received)
    assert parse_header(packed).checksum == header_for(payload).checksum_of(digests_of(payload))
    assert_all_done_soon(tickets)


@pytest.mark.parametrize("address", [NOWHERE, "ipc:///tmp/kvrelay-nobody-listens-here"])
@pytest.mark.parametrize("nbytes", [1, BIG_NBYTES])
def test_closing_fences_off_a_peer_that_never_existed(sending: Make, address: str, nbytes: int) -> None:
    prefill = sending(address)
    tickets = prefill.send(20, nbytes)
    assert not any(ticket.is_done for ticket in tickets)
    prefill.sender.close()
    prefill.sender.join()
    assert_all_done_soon(tickets)
    with pytest.raises(WireError, match="closed"):
        prefill.send()
    assert not prefill.has_told.is_set()


class Held(NeverThere):
    """Bytes that do not arrive until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def wait(self, reader: object, timeout_s: float) -> None:
        self.is_awaited.set()
        self.released.wait(WAIT_S)


def test_closing_does_not_wait_for_a_block_that_is_read(sending: Make, peer: Any) -> None:
    """Links are closed on the asyncio loop, which must go on."""
    held, prefill = Held(), sending(bound(peer))
    [ticket] = prefill.send(payload=held)
    assert held.is_awaited.wait(WAIT_S)
    prefill.sender.close()
    assert not ticket.is_done
    held.released.set()
    prefill.sender.join()
    assert_all_done_soon([ticket])


def test_closing_fences_off_a_peer_that_does_not_read(sending: Make, peer: Any) -> None:
    """The connection's buffers are full and many blocks wait. Closing the sender releases them all."""
    prefill = sending(bound(peer))
    tickets = prefill.send(50, BIG_NBYTES)
    assert peer.poll(WAIT_S * 1000)  # traffic flows
    assert not tickets[-1].is_done
    prefill.sender.close()
    prefill.sender.join()
    assert_all_done_soon(tickets)


def test_a_taken_data_address_is_a_clear_error(one_rig: Rig) -> None:
    with pytest.raises(WireError, match="cannot listen for KV blocks"):
        BlockReceiver(one_rig.receiver.address, one_rig.table, 512, context=one_rig.context)


@pytest.mark.parametrize(("block_nbytes", "num_blocks"), [(2**16, 32), (8 * 2**20, 8), (2**28, 1)])
def test_few_large_blocks_wait_beside_the_pool(block_nbytes: int, num_blocks: int) -> None:
    assert read_ahead(block_nbytes) == num_blocks


@needs_ipv6
def test_a_hand_off_goes_over_ipv6(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(address="tcp://::1:0")
    assert rig.receiver.address.startswith("tcp://[::1]:")
    rig.assert_holds(rig.hand_over())


def test_a_receiver_that_never_started_stops(one_rig: Rig) -> None:
    receiver = BlockReceiver("tcp://127.0.0.1:0", one_rig.table, 512, context=one_rig.context)
    assert not receiver.is_alive
    receiver.stop()
    receiver.stop()


def test_the_receiver_stops_in_the_middle_of_blocks(one_rig: Rig) -> None:
    lease = one_rig.leased(8 * BLOCK_SIZE)
    one_rig.table.may_finish.clear()
    for index in range(8):
        one_rig.send(*lease.frames(index))
    one_rig.table.inside.get(timeout=WAIT_S)
    stopping = threading.Thread(target=one_rig.receiver.stop)
    stopping.start()
    until(lambda: one_rig.receiver._wakeup.is_set, "a stop that does not begin")
    one_rig.table.may_finish.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert not one_rig.receiver.is_alive
    assert one_rig.table.snapshot()[0]["received"] == 1
    one_rig.table.cancel("r", 1)
    one_rig.assert_all_free()


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
    own.remove()  # the file is gone already
    assert not path.exists()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:80", "ipc://@abstract"])
def test_an_endpoint_without_a_file_has_nothing_to_remove(endpoint: str) -> None:
    SocketFile(endpoint).remove()


def break_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The next send of a line fails with ``error``, although the line had said that it has room."""
    errors = [error]
    send = zmq.Socket.send

    def fail_first(socket: Any, *arguments: Any, **options: Any) -> Any:
        if socket.type == zmq.DEALER and errors:
            raise errors.pop()
        return send(socket, *arguments, **options)

    monkeypatch.setattr(zmq.Socket, "send", fail_first)


def test_a_connection_that_breaks_between_asking_and_sending_costs_no_block(
    sending: Make, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = sending(bound(peer))
    break_once(monkeypatch, zmq.Again())
    tickets = prefill.send(3)
    came: set[int] = set()
    for _ in tickets:
        assert peer.poll(WAIT_S * 1000)
        came.add(parse_header(peer.recv_multipart()[1]).block_index)
    assert came == {0, 1, 2}
    assert_all_done_soon(tickets)


def test_a_thread_that_dies_leaves_no_block_held(sending: Make, peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's thread dies. All blocks are released, and further sends fail, so that no request uses this link."""
    break_once(monkeypatch, OSError("broken"))
    prefill = sending(bound(peer))
    tickets: list[SendTicket] = []

    def has_ended() -> bool:
        with contextlib.suppress(WireError):
            tickets.extend(prefill.send())
        return not prefill.sender.is_alive

    until(has_ended, "the sender's end")
    prefill.assert_ends(tickets)
    with pytest.raises(WireError):
        prefill.send()
