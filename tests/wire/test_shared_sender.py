"""The sending end of shared memory: when it is used and when TCP is, and that nothing holds a block or a thread for ever."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.errors import WireError
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import BlockSealer, new_key
from kvrelay.wire.shared_packets import pack_answer, pack_slots, split_block
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_ring import RingShape
from kvrelay.wire.shared_sender import SharedTarget

from .lease_bench import BLOCK_NBYTES, until
from .rig import Rig, assert_done_soon
from .shared_peer import SharedDoor, header_for, num_mapped_rings, open_descriptors

NUM_SLOTS = RingShape.of(BLOCK_NBYTES).num_slots
ABSTRACT = SharedPlace()
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def door() -> Iterator[SharedDoor]:
    before, rings = open_descriptors(), num_mapped_rings()
    with SharedDoor() as door:
        yield door
    assert open_descriptors() == before
    assert num_mapped_rings() == rings


class Prefill:
    """A sender to nowhere over TCP, and to a door through shared memory."""

    def __init__(
        self, context: Any, name: str | None, place: SharedPlace | None = ABSTRACT, num_sockets: int = 1
    ) -> None:
        self.registry = CollectorRegistry()
        target = SharedTarget(name, place, BLOCK_NBYTES, "the token")
        metrics = WireMetrics(self.registry)
        self.sender = BlockSender(NOWHERE, metrics=metrics, context=context, shared=target, num_sockets=num_sockets)
        self.payload = memoryview(bytearray(b"k" * BLOCK_NBYTES))

    def send(self, num_blocks: int = 1, sealer: BlockSealer | None = None) -> list[Any]:
        return [self.sender.send(header_for(self.payload, n), self.payload, sealer) for n in range(num_blocks)]

    def lines(self, path: str) -> float:
        return self.registry.get_sample_value("kvrelay_kv_data_lines_total", {"path": path}) or 0.0

    def blocks(self, path: str) -> float:
        return self.registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": path}) or 0.0

    def wait_for(self, path: str) -> None:
        until(lambda: self.lines(path) == 1, f"no line over {path}")


# -- which way ---------------------------------------------------------------------------------------------------------------


def test_one_host_is_shared_memory_and_the_log_says_so(
    one_rig: Rig, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill = Prefill(context, one_rig.shared.name)
    prefill.wait_for("shared_memory")
    (ticket,) = prefill.send()
    assert_done_soon(ticket)
    assert one_rig.next_block() == "stale_epoch"
    assert (prefill.blocks("shared_memory"), prefill.blocks("tcp"), prefill.lines("tcp")) == (1, 0, 0)
    prefill.sender.close()
    assert f"KV blocks for {NOWHERE} go through shared memory, 32 slots of 4096 bytes" in caplog.text


@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        ("@kvrelay-nobody", SharedPlace(), "cannot be reached from here (Connection refused)"),
        ("kvrelay-nobody.sock", SharedPlace(Path("/proc")), "cannot be reached from here (No such file or directory)"),
        ("/run/somebody", SharedPlace(), "is no name of a decode worker's socket"),
        ("kvrelay-file.sock", SharedPlace(), "a directory at the decode worker and auto here"),
        (None, SharedPlace(), "the decode worker takes none"),
        ("@kvrelay-somebody", None, "--shared-memory is off"),
    ],
)
def test_whatever_has_no_memory_in_common_goes_over_tcp(
    context: Any, caplog: pytest.LogCaptureFixture, name: str | None, place: SharedPlace | None, says: str
) -> None:
    """Another host, another pod, an older worker, another setting."""
    caplog.set_level(logging.INFO)
    before, rings = open_descriptors(), num_mapped_rings()
    prefill = Prefill(context, name, place)
    prefill.wait_for("tcp")
    (ticket,) = prefill.send()
    prefill.sender.close()
    assert_done_soon(ticket)
    assert says in caplog.text
    assert caplog.text.count("go over TCP, not through shared memory") == 1
    assert prefill.lines("shared_memory") == 0
    assert open_descriptors() == before
    assert num_mapped_rings() == rings


def test_a_refusal_is_logged_and_blocks_go_over_tcp(
    context: Any, door: SharedDoor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill = Prefill(context, door.name)
    door.accept(pack_answer("not today"))
    prefill.wait_for("tcp")
    assert "refuses it: not today" in caplog.text
    prefill.sender.close()


def test_who_does_not_answer_is_not_waited_for_longer_than_the_bound(
    context: Any, door: SharedDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a decode worker that is stopped: the connection stands, and nobody is behind it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("kvrelay.wire.shared_sender._ANSWER_S", 0.05)
    prefill = Prefill(context, door.name)
    prefill.wait_for("tcp")
    assert "does not answer within 0.05 s" in caplog.text
    prefill.sender.close()


def test_a_backlog_that_is_full_is_not_waited_for(context: Any, door: SharedDoor) -> None:
    door.listener.listen(0)
    first, second = Prefill(context, door.name), Prefill(context, door.name)
    until(lambda: first.lines("tcp") + second.lines("tcp") == 1, "both wait for a place")
    first.sender.close()
    second.sender.close()


# -- blocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_ticket_is_done_when_the_block_lies_in_its_slot(context: Any, door: SharedDoor, is_sealed: bool) -> None:
    prefill = Prefill(context, door.name)
    connection = door.accept()
    prefill.wait_for("shared_memory")
    (ticket,) = prefill.send(1, BlockSealer(new_key()) if is_sealed else None)
    slot, frame = split_block(connection.recv(1000))
    assert_done_soon(ticket)
    lies = os.pread(door.descriptors[0], BLOCK_NBYTES, slot * RingShape.of(BLOCK_NBYTES).slot_nbytes)
    assert (lies == prefill.payload) is not is_sealed
    if not is_sealed:
        assert frame == header_for(prefill.payload).pack(prefill.payload)
    prefill.sender.close()


def test_a_sender_waits_for_slots_and_goes_on_when_they_come_back(context: Any, door: SharedDoor) -> None:
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(2 * NUM_SLOTS)
    slots = [split_block(connection.recv(1000))[0] for _ in range(NUM_SLOTS)]
    assert sorted(slots) == list(range(NUM_SLOTS))
    for ticket in tickets[:NUM_SLOTS]:
        assert_done_soon(ticket)
    assert not any(ticket.is_done for ticket in tickets[NUM_SLOTS:])
    connection.send(pack_slots([7]))
    assert split_block(connection.recv(1000))[0] == 7
    connection.send(pack_slots(slots))
    for _ in range(NUM_SLOTS - 1):
        connection.recv(1000)
    for ticket in tickets:
        assert_done_soon(ticket)
    prefill.sender.close()


def test_a_block_that_was_called_off_while_there_was_no_slot_is_not_sent(context: Any, door: SharedDoor) -> None:
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(NUM_SLOTS + 2)
    for _ in range(NUM_SLOTS):
        connection.recv(1000)
    tickets[NUM_SLOTS].call_off()
    assert tickets[NUM_SLOTS].is_done
    connection.send(pack_slots([0]))
    _, frame = split_block(connection.recv(1000))
    assert frame == header_for(prefill.payload, NUM_SLOTS + 1).pack(prefill.payload)
    prefill.sender.close()


@pytest.mark.parametrize("num_blocks", [1, NUM_SLOTS + 5])
def test_a_broken_line_ends_the_sender_and_every_ticket(context: Any, door: SharedDoor, num_blocks: int) -> None:
    """While nothing is to be sent, and while blocks wait for slots."""
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(num_blocks)
    connection.recv(1000)
    door.hang_up()
    for ticket in tickets:
        assert_done_soon(ticket)
    until(lambda: not prefill.sender.is_alive, "it does not notice")
    with pytest.raises(WireError, match="closed"):
        prefill.send()
    prefill.sender.close()


@pytest.mark.parametrize("packet", [b"junk!", pack_slots([NUM_SLOTS]), pack_slots([1, 1]), pack_slots([2**32 - 1])])
def test_slots_that_cannot_be_end_the_sender(context: Any, door: SharedDoor, packet: bytes) -> None:
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(NUM_SLOTS + 1)
    connection.send(packet)
    until(lambda: not prefill.sender.is_alive, "it goes on")
    for ticket in tickets:
        assert_done_soon(ticket)
    prefill.sender.close()


# -- several lines -----------------------------------------------------------------------------------------------------------


def test_blocks_that_wait_open_one_more_ring_and_go_through_whichever_has_room(context: Any, door: SharedDoor) -> None:
    prefill = Prefill(context, door.name, num_sockets=2)
    tickets = prefill.send(2 * NUM_SLOTS + 3)
    with door.accept() as first:
        slots = [split_block(first.recv(1000))[0] for _ in range(NUM_SLOTS)]
        door.let_go_of_memory()
        second = door.accept()
        for _ in range(NUM_SLOTS):
            second.recv(1000)
        first.send(pack_slots(slots[:3]))  # the second has no room
        assert [split_block(first.recv(1000))[0] for _ in range(3)] == slots[2::-1]
        for ticket in tickets:
            assert_done_soon(ticket)
        assert prefill.lines("shared_memory") == 2
        assert prefill.lines("tcp") == 0
        prefill.sender.close()


def test_a_further_ring_that_is_not_taken_is_done_without(
    context: Any, door: SharedDoor, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = Prefill(context, door.name, num_sockets=3)
    tickets = prefill.send(2 * NUM_SLOTS)  # before there is a line: they wait behind the first block
    with door.accept() as first:
        door.let_go_of_memory()
        door.accept(pack_answer("too many"))
        slots = [split_block(first.recv(1000))[0] for _ in range(NUM_SLOTS)]
        first.send(pack_slots(slots))
        for ticket in tickets:
            assert_done_soon(ticket)
        until(lambda: "go over 1 connections, no more can be opened" in caplog.text, "the log's word")
        assert prefill.sender.is_alive
        prefill.sender.close()
    assert prefill.lines("shared_memory") == 1


# -- the end -----------------------------------------------------------------------------------------------------------------


def test_closing_while_there_is_no_slot(context: Any, door: SharedDoor) -> None:
    """The receiver is stopped, or hangs: it gives no slot back, and never will."""
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(3 * NUM_SLOTS)
    for _ in range(NUM_SLOTS):
        connection.recv(1000)
    prefill.sender.close()
    assert all(ticket.is_done for ticket in tickets)


def test_closing_while_the_answer_is_awaited(context: Any, door: SharedDoor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill = Prefill(context, door.name)
    tickets = prefill.send(3)
    door.accept(None)
    prefill.sender.close()
    assert all(ticket.is_done for ticket in tickets)
    assert "go over TCP" not in caplog.text


def test_closing_while_the_socket_takes_nothing(context: Any, door: SharedDoor) -> None:
    """Its slots come back, but what tells of new blocks is never read."""
    prefill = Prefill(context, door.name)
    connection = door.accept()
    tickets = prefill.send(2000)
    for number in range(2000 // NUM_SLOTS):
        try:
            connection.send(pack_slots(range(NUM_SLOTS)))
        except BrokenPipeError:
            break
        until(
            lambda sent=(number + 1) * NUM_SLOTS: prefill.blocks("shared_memory") >= min(sent, 150), "it does not send"
        )
    assert not tickets[-1].is_done
    prefill.sender.close()
    assert all(ticket.is_done for ticket in tickets)


def test_hand_offs_leave_no_descriptor_and_no_memory(context: Any) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    for seals_kv in (False, True):
        rig = Rig(context, path="shared_memory", seals_kv=seals_kv)
        rig.hand_over(num_tokens=100)
        assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": "tcp"}) is None
        assert num_mapped_rings() == rings + 2
        rig.close()
    assert open_descriptors() == before
    assert num_mapped_rings() == rings
