"""Hand-offs over several data sockets or rings: who lands blocks side by side, what becomes of a lease meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.blocks.frames import BlockHeader, parse_header
from kvrelay.wire.blocks.send_job import Line, SendJob
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import TcpLine
from kvrelay.wire.lines.shared.sender import SharedTarget
from kvrelay.wire.messages import Grant
from kvrelay.wire.metrics import WireMetrics

from ..lease_bench import BAD_PAYLOAD, BLOCK_SIZE, WAIT_S, Granted, offer_of, until
from ..rig import Rig
from ..sending import assert_all_done_soon

NUM_SOCKETS = 3
PATHS = ["tcp", "shared_memory"]
BIG_NBYTES = 2**20


def num_lines(registry: CollectorRegistry, path: str = "tcp") -> float:
    return registry.get_sample_value("kvrelay_kv_data_lines_total", {"path": path}) or 0


def test_blocks_that_wait_are_spread_over_as_many_connections_as_there_may_be(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a peer that does not read, so that blocks do wait; then it reads, and everything is there, once."""
    ship, used = TcpLine.ship, set[TcpLine]()

    def shipping(line: TcpLine, job: SendJob) -> bool:
        is_going_on = ship(line, job)
        used.add(line)
        return is_going_on

    monkeypatch.setattr(TcpLine, "ship", shipping)
    with context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        peer.rcvhwm = 2
        peer.rcvbuf = 2**16
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        registry = CollectorRegistry()
        metrics = WireMetrics(registry)
        sender = BlockSender(f"tcp://127.0.0.1:{port}", metrics=metrics, context=context, num_sockets=NUM_SOCKETS)
        payload = memoryview(bytearray(BIG_NBYTES))
        num_blocks = 120
        tickets = [sender.send(BlockHeader(1, 1, index, BIG_NBYTES, b"h" * 16), payload) for index in range(num_blocks)]
        until(lambda: len(used) == NUM_SOCKETS, "connections that are never used")
        assert not all(ticket.is_done for ticket in tickets)
        came: list[int] = []
        connections: set[bytes] = set()
        for _ in range(num_blocks):
            assert peer.poll(WAIT_S * 1000)
            routing_id, header, _ = peer.recv_multipart()
            came.append(parse_header(header).block_index)
            connections.add(routing_id)
        assert sorted(came) == list(range(num_blocks))
        assert len(connections) == num_lines(registry) == NUM_SOCKETS
        assert_all_done_soon(tickets)
        sender.close()


@pytest.mark.parametrize("seals_kv", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_lease_is_landed_by_several_threads_at_a_time(
    make_rig: Callable[..., Rig], path: str, seals_kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more blocks than rings have slots for, all there before the first line: those that wait have every line opened."""
    num_blocks = 32 * NUM_SOCKETS + 4
    are_queued, shared_line = threading.Event(), BlockSender._shared_line

    def open_late(sender: BlockSender, shared: SharedTarget) -> Line:
        assert are_queued.wait(WAIT_S)
        until(lambda: threading.current_thread() in sender._threads, "else it would not open the next one yet")
        return shared_line(sender, shared)

    monkeypatch.setattr(BlockSender, "_shared_line", open_late)
    rig = make_rig(num_blocks=num_blocks + 1, path=path, num_sockets=NUM_SOCKETS, seals_kv=seals_kv)
    rig.table.may_finish.clear()
    key, _ = rig.granted(num_blocks * BLOCK_SIZE)
    rig.commit(key)
    are_queued.set()
    assert len({rig.table.inside.get(timeout=WAIT_S) for _ in range(NUM_SOCKETS)}) == NUM_SOCKETS
    rig.table.may_finish.set()
    rig.pump()
    rig.assert_holds(rig.verdict())
    if path == "shared_memory":
        assert [num_lines(rig.prefill_registry, one) for one in ("shared_memory", "tcp")] == [NUM_SOCKETS, 0]
    rig.settle()


@pytest.mark.parametrize(("num_sockets", "num_threads"), [(1, NUM_SOCKETS), (NUM_SOCKETS, 1)])
@pytest.mark.parametrize("path", PATHS)
def test_peers_need_not_have_the_same_number(
    make_rig: Callable[..., Rig], path: str, num_sockets: int, num_threads: int
) -> None:
    rig = make_rig(path=path, num_sockets=num_threads)
    rig.num_sockets = num_sockets
    rig.link, rig.line = rig.new_link()
    for number in range(3):
        lease = rig.hand_over(7 * BLOCK_SIZE, f"r{number}")
        rig.manager.release(Owner(OwnerKind.LEASE, lease.lease_key))


def test_the_receiver_stops_with_all_its_threads_in_the_middle_of_blocks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(num_sockets=NUM_SOCKETS)
    lease = rig.leased(8 * BLOCK_SIZE)
    rig.table.may_finish.clear()
    for index in range(8):
        rig.send(*lease.frames(index))
    for _ in range(NUM_SOCKETS):
        rig.table.inside.get(timeout=WAIT_S)
    stopping = threading.Thread(target=rig.receiver.stop)
    stopping.start()
    until(lambda: rig.receiver._is_stopped, "a stop that does not begin")
    rig.table.may_finish.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert not rig.receiver.is_alive
    assert rig.table.snapshot()[0]["received"] in range(NUM_SOCKETS, 9)
    rig.table.cancel("r", 1)
    rig.assert_all_free()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
def test_hand_offs_at_random(make_rig: Callable[..., Rig], way: dict[str, Any], seals_kv: bool, seed: int) -> None:
    """Hand-offs at a time that end well, are given up on either side, meet blocks of another epoch, or lose their link."""
    rng = random.Random(seed)
    rig = make_rig(num_blocks=1024, seals_kv=seals_kv, **way)
    opened: list[tuple[str, int]] = []
    for turn in range(12):
        fates: dict[int, str] = {}
        for number in range(rng.randrange(1, 4)):
            fate = rng.choice(["commit", "commit", "cancel", "abort", "stale"])
            offer = offer_of(rng.choices(range(1000), k=rng.randrange(1, 60)), f"{turn}-{number}")
            opened.append(rig.open(offer))
            (grant,) = rig.pump()
            assert isinstance(grant, Grant)
            fates[grant.lease_id] = fate
            if fate == "stale":
                stale = Granted(offer, grant).header(0, epoch=grant.epoch - 1)
                rig.link.data.send(stale, memoryview(BAD_PAYLOAD), None)
            rig.commit(opened[-1])
            if fate == "cancel":
                rig.table.cancel(*opened[-1])
            elif fate == "abort":
                rig.transfers.abort(opened[-1], "test")
            rig.pump()
        if rng.random() < 0.3:  # the link breaks in the middle of whatever is on its way
            rig.senders[-1].close()
            rig.transfers.on_link_lost(rig.link)
            rig.table.abort_peer("p")
            rig.link, rig.line = rig.new_link()
            fates = dict.fromkeys(fates, "lost")
        await_ends(rig, fates)
    rig.settle()
    assert sorted(rig.transfer_ends.released) == sorted(opened)
    assert not +rig.source.reads
    rig.assert_all_free()


def await_ends(rig: Rig, fates: dict[int, str]) -> None:
    """Each lease ends once: those that nobody gives up are verified, with the right bytes in the pool."""
    until(lambda: rig.ends.verified.qsize() + rig.ends.rejected.qsize() == len(fates), "leases without an end")
    while not rig.ends.verified.empty():
        lease = rig.verdict()
        del fates[lease.lease_id]
        rig.assert_holds(lease)
        rig.manager.release(Owner(OwnerKind.LEASE, lease.lease_key))
    while not rig.ends.rejected.empty():
        assert fates.pop(rig.rejection().lease_id) in ("cancel", "abort", "lost")
    assert fates == {}
    rig.manager.check_integrity()
