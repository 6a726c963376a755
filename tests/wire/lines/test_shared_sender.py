"""The sender over shared memory: when it uses shared memory or TCP, and that it releases all blocks and threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.block_digests import digests_of
from kvrelay.wire.blocks.seal import BlockSealer, new_key
from kvrelay.wire.errors import WireError
from kvrelay.wire.lines.shared.packets import pack_answer, pack_slots, split_block
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.ring import RingShape
from kvrelay.wire.lines.shared.sender import SharedTarget

from ..lease_bench import BLOCK_NBYTES, until
from ..rig import Rig
from ..sending import NOWHERE, Sending, assert_all_done_soon, header_for
from ..shared_peer import SharedDoor, nothing_left, num_mapped_rings

NUM_SLOTS = RingShape.of(BLOCK_NBYTES).num_slots
ABSTRACT = SharedPlace()
PAYLOAD = memoryview(b"k" * BLOCK_NBYTES)
To = Callable[..., Sending]


@pytest.fixture(autouse=True)
def tidy(context: Any) -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def door() -> Iterator[SharedDoor]:
    with SharedDoor() as door:
        yield door


@pytest.fixture
def to(sending: Callable[..., Sending]) -> Callable[..., Sending]:
    """Makes senders whose shared-memory target is given, and whose TCP address has no listener."""

    def make(name: str | None, place: SharedPlace | None = ABSTRACT) -> Sending:
        return sending(shared=SharedTarget(name, place, BLOCK_NBYTES, "the token"))

    return make


def wait_for_line(prefill: Sending, path: str) -> None:
    until(lambda: prefill.lines(path) == 1, f"no line over {path}")


# -- which way ---------------------------------------------------------------------------------------------------------------


def test_one_host_is_shared_memory_and_the_log_says_so(one_rig: Rig, to: To, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill = to(one_rig.shared.name)
    wait_for_line(prefill, "shared_memory")
    tickets = prefill.send()
    assert_all_done_soon(tickets)
    assert one_rig.next_block() == "stale_epoch"
    prefill.sender.close()  # it counts a block after it has sent it
    prefill.sender.join()
    assert (prefill.blocks("shared_memory"), prefill.blocks("tcp"), prefill.lines("tcp")) == (1, 0, 0)
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
    to: To, caplog: pytest.LogCaptureFixture, name: str | None, place: SharedPlace | None, says: str
) -> None:
    """Shared memory is off, unknown or out of reach. Blocks go over TCP, and the log says why once."""
    caplog.set_level(logging.INFO)
    prefill = to(name, place)
    wait_for_line(prefill, "tcp")
    tickets = prefill.send()
    prefill.sender.close()
    prefill.sender.join()
    assert_all_done_soon(tickets)
    assert says in caplog.text
    assert caplog.text.count("go over TCP, not through shared memory") == 1
    assert prefill.lines("shared_memory") == 0


@pytest.mark.parametrize(
    ("answer", "says"),
    [(pack_answer("not today"), "refuses it: not today"), (b"?", "its answer is none"), (b"", "before the answer")],
)
def test_a_refusal_is_logged_and_blocks_go_over_tcp(
    to: To, door: SharedDoor, caplog: pytest.LogCaptureFixture, answer: bytes, says: str
) -> None:
    caplog.set_level(logging.INFO)
    prefill = to(door.name)
    door.accept(answer or None)
    if not answer:
        door.hang_up()
    wait_for_line(prefill, "tcp")
    assert says in caplog.text


def test_who_does_not_answer_is_not_waited_for_longer_than_the_bound(
    to: To, door: SharedDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped decode worker accepts the connection but never answers. After the time limit blocks go over TCP."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("kvrelay.wire.lines.shared.sender._ANSWER_S", 0.05)
    prefill = to(door.name)
    wait_for_line(prefill, "tcp")
    assert "does not answer within 0.05 s" in caplog.text


def test_a_backlog_that_is_full_is_not_waited_for(to: To, door: SharedDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sender has the only place, and waits for its answer. The other one does not wait."""
    monkeypatch.setattr("kvrelay.wire.lines.shared.sender._ANSWER_S", 60.0)
    door.listener.listen(0)
    first, second = to(door.name), to(door.name)
    until(lambda: first.lines("tcp") + second.lines("tcp") == 1, "both wait for a place")


# -- blocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_ticket_is_done_when_the_block_lies_in_its_slot(to: To, door: SharedDoor, is_sealed: bool) -> None:
    prefill = to(door.name)
    connection = door.accept()
    wait_for_line(prefill, "shared_memory")
    tickets = prefill.send(sealer=BlockSealer(new_key()) if is_sealed else None)
    slot, frame = split_block(connection.recv(1000))
    assert_all_done_soon(tickets)
    lies = os.pread(door.descriptors[0], BLOCK_NBYTES, slot * RingShape.of(BLOCK_NBYTES).slot_nbytes)
    assert (lies == PAYLOAD) is not is_sealed
    if not is_sealed:
        assert frame == header_for(PAYLOAD).pack(digests_of(PAYLOAD))


def test_a_sender_waits_for_slots_and_goes_on_when_they_come_back(to: To, door: SharedDoor) -> None:
    prefill = to(door.name)
    connection = door.accept()
    tickets = prefill.send(2 * NUM_SLOTS)
    slots = [split_block(connection.recv(1000))[0] for _ in range(NUM_SLOTS)]
    assert sorted(slots) == list(range(NUM_SLOTS))
    assert_all_done_soon(tickets[:NUM_SLOTS])
    assert not any(ticket.is_done for ticket in tickets[NUM_SLOTS:])
    connection.send(pack_slots([7]))
    assert split_block(connection.recv(1000))[0] == 7
    connection.send(pack_slots(slots))
    for _ in range(NUM_SLOTS - 1):
        connection.recv(1000)
    assert_all_done_soon(tickets)


def test_a_block_that_was_called_off_while_there_was_no_slot_is_not_sent(to: To, door: SharedDoor) -> None:
    prefill = to(door.name)
    connection = door.accept()
    tickets = prefill.send(NUM_SLOTS + 2)
    for _ in range(NUM_SLOTS):
        connection.recv(1000)
    tickets[NUM_SLOTS].call_off()
    assert tickets[NUM_SLOTS].is_done
    connection.send(pack_slots([0]))
    _, frame = split_block(connection.recv(1000))
    assert frame == header_for(PAYLOAD, NUM_SLOTS + 1).pack(digests_of(PAYLOAD))


@pytest.mark.parametrize("num_blocks", [1, NUM_SLOTS + 5])
def test_a_broken_line_ends_the_sender_and_every_ticket(to: To, door: SharedDoor, num_blocks: int) -> None:
    """The connection breaks while no block waits, or while blocks wait for slots."""
    prefill = to(door.name)
    connection = door.accept()
    tickets = prefill.send(num_blocks)
    connection.recv(1000)
    door.hang_up()
    assert_all_done_soon(tickets)
    until(lambda: not prefill.sender.is_alive, "it does not notice")
    with pytest.raises(WireError, match="closed"):
        prefill.send()


@pytest.mark.parametrize("packet", [b"junk!", pack_slots([NUM_SLOTS]), pack_slots([1, 1]), pack_slots([2**32 - 1])])
def test_slots_that_cannot_be_end_the_sender(to: To, door: SharedDoor, packet: bytes) -> None:
    prefill = to(door.name)
    connection = door.accept()
    tickets = prefill.send(NUM_SLOTS + 1)
    connection.send(packet)
    until(lambda: not prefill.sender.is_alive, "it goes on")
    assert_all_done_soon(tickets)


# -- the end -----------------------------------------------------------------------------------------------------------------


def test_closing_while_there_is_no_slot(to: To, door: SharedDoor) -> None:
    """The receiver gives no slot back. Closing the sender releases the waiting blocks."""
    prefill = to(door.name)
    connection = door.accept()
    tickets = prefill.send(3 * NUM_SLOTS)
    for _ in range(NUM_SLOTS):
        connection.recv(1000)
    prefill.sender.close()
    prefill.sender.join()
    assert all(ticket.is_done for ticket in tickets)


def test_closing_while_the_answer_is_awaited(to: To, door: SharedDoor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill = to(door.name)
    tickets = prefill.send(3)
    door.accept(None)
    prefill.sender.close()
    prefill.sender.join()
    assert all(ticket.is_done for ticket in tickets)
    assert "go over TCP" not in caplog.text


def test_closing_while_the_socket_takes_nothing(to: To, door: SharedDoor) -> None:
    """The receiver gives slots back, but never reads which blocks were sent. Closing the sender releases all blocks."""
    prefill = to(door.name)
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
    prefill.sender.join()
    assert all(ticket.is_done for ticket in tickets)


@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
def test_hand_offs_leave_no_descriptor_and_no_memory(make_rig: Callable[..., Rig], seals_kv: bool) -> None:
    rings = num_mapped_rings()
    rig = make_rig(path="shared_memory", seals_kv=seals_kv)
    rig.hand_over(num_tokens=100)
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": "tcp"}) is None
    assert num_mapped_rings() == rings + 2
