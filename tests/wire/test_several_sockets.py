"""Hand-offs over several data sockets or rings: who lands blocks side by side, what becomes of a lease meanwhile, older peers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.block_manager import Owner, OwnerKind
from kvrelay.wire.block_frames import BlockHeader, parse_header
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.data_plane import TcpLine
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.messages import FailureCode, Grant, Timings
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import Line, SendJob
from kvrelay.wire.shared_sender import SharedTarget

from .handoffs import hand_over, offer_for, send_block
from .rig import BLOCK_NBYTES, BLOCK_SIZE, WAIT_S, Rig, assert_done_soon, content_of, until

NUM_SOCKETS = 3
PATHS = ["tcp", "shared_memory"]
BIG_NBYTES = 2**20


@contextmanager
def rig_of(context: Any, num_blocks: int = 32, **options: Any) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", num_blocks, **options)
    yield rig
    rig.close()


def num_lines(registry: CollectorRegistry, path: str = "tcp") -> float:
    return registry.get_sample_value("kvrelay_kv_data_lines_total", {"path": path}) or 0


class Gate:
    """Lets receiving threads out of their writes one by one."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._leave = threading.Semaphore(0)
        finish_block = rig.leases.finish_block

        def finish(header: BlockHeader, payload: memoryview | None) -> None:
            assert self._leave.acquire(timeout=WAIT_S)
            finish_block(header, payload)

        monkeypatch.setattr(rig.leases, "finish_block", finish)

    def let_out(self, num_threads: int = 1) -> None:
        self._leave.release(num_threads)


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
        for ticket in tickets:
            assert_done_soon(ticket)
        sender.close()


@pytest.mark.parametrize("seals_kv", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_lease_is_landed_by_several_threads_at_a_time(
    context: Any, path: str, seals_kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more blocks than rings have slots for, all there before the first line: those that wait have every line opened."""
    num_blocks = 32 * NUM_SOCKETS + 4
    are_queued, shared_line = threading.Event(), BlockSender._shared_line

    def open_late(sender: BlockSender, shared: SharedTarget) -> Line:
        assert are_queued.wait(WAIT_S)
        until(lambda: threading.current_thread() in sender._threads, "else it would not open the next one yet")
        return shared_line(sender, shared)

    monkeypatch.setattr(BlockSender, "_shared_line", open_late)
    with rig_of(context, num_blocks + 1, path=path, num_sockets=NUM_SOCKETS, seals_kv=seals_kv) as rig:
        gate = Gate(rig, monkeypatch)
        key, _ = rig.granted(num_blocks * BLOCK_SIZE)
        rig.commit(key)
        are_queued.set()
        indices = {rig.leases.inside.get(timeout=WAIT_S) for _ in range(NUM_SOCKETS)}
        assert len(indices) == NUM_SOCKETS
        gate.let_out(num_blocks)
        rig.pump()
        lease = rig.verdict()
        for block_id, block_hash in zip(lease.block_ids, lease.offer.block_hashes, strict=False):
            assert bytes(rig.store.block(block_id)) == content_of(block_hash)
        if path == "shared_memory":
            assert [num_lines(rig.prefill_registry, one) for one in ("shared_memory", "tcp")] == [NUM_SOCKETS, 0]
        rig.settle()


@pytest.mark.parametrize("how", ["cancel", "lie"])
@pytest.mark.parametrize("path", PATHS)
def test_blocks_are_released_when_the_last_of_several_writers_is_out(
    context: Any, path: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(context, path=path, num_sockets=NUM_SOCKETS) as rig:
        gate = Gate(rig, monkeypatch)
        offer, grant = offer_for(rig, 8 * BLOCK_SIZE)
        for index in range(NUM_SOCKETS - 1):
            send_block(rig, offer, grant, index)
        send_block(rig, offer, grant, 2, None if how == "cancel" else b"\xee" * BLOCK_NBYTES)
        assert {rig.leases.inside.get(timeout=WAIT_S) for _ in range(NUM_SOCKETS)} == {0, 1, 2}
        if how == "cancel":
            rig.leases.cancel("r", 1)
        else:
            with pytest.raises(BlockRefusedError, match="another block's hash"):
                rig.leases.begin_block(rig.header(grant, offer, 3, block_hash=b"?" * 16))
            assert rig.next_block() == "wrong_block"
        for num_inside in range(NUM_SOCKETS, 0, -1):
            assert rig.leases.snapshot()[0]["state"] == "aborting"
            assert rig.lease_ends.rejected.empty()
            assert rig.manager.ledger().num_leased == 9
            gate.let_out()
            assert rig.next_block() in ("ok", "bad_checksum")
            if num_inside > 1:
                assert rig.leases.snapshot(), "released while a thread still writes"
        expected = FailureCode.CANCELLED if how == "cancel" else FailureCode.INTEGRITY
        assert rig.rejection().code is expected
        rig.assert_all_free()
        send_block(rig, offer, grant, 4)
        assert rig.next_block() == "unknown_lease"
        assert rig.lease_ends.rejected.empty(), "told twice"


@pytest.mark.parametrize("path", PATHS)
def test_one_block_that_comes_over_two_connections_at_once_is_written_once(
    context: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(context, path=path, num_sockets=NUM_SOCKETS) as rig:
        gate = Gate(rig, monkeypatch)
        offer, grant = offer_for(rig)
        for _ in range(NUM_SOCKETS):
            send_block(rig, offer, grant, 0)
        assert [rig.next_block() for _ in range(NUM_SOCKETS - 1)] == ["duplicate"] * (NUM_SOCKETS - 1)
        gate.let_out()
        assert rig.next_block() == "ok"
        assert rig.store.num_write_opens == 1


@pytest.mark.parametrize(("num_sockets", "num_threads"), [(1, NUM_SOCKETS), (NUM_SOCKETS, 1)])
@pytest.mark.parametrize("path", PATHS)
def test_peers_need_not_have_the_same_number(context: Any, path: str, num_sockets: int, num_threads: int) -> None:
    """As an older worker at either end, which knows of one."""
    with rig_of(context, path=path, num_sockets=num_threads) as rig:
        rig.num_sockets = num_sockets
        rig.link, rig.line = rig.new_link()
        for number in range(3):
            lease = hand_over(rig, 7 * BLOCK_SIZE, f"r{number}")
            rig.manager.release(Owner(OwnerKind.LEASE, lease.lease_key))
        assert len(rig.receiver._threads) == num_threads


def test_the_receiver_stops_with_all_its_threads_in_the_middle_of_blocks(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(context, num_sockets=NUM_SOCKETS) as rig:
        gate = Gate(rig, monkeypatch)
        offer, grant = offer_for(rig, 8 * BLOCK_SIZE)
        for index in range(8):
            send_block(rig, offer, grant, index)
        for _ in range(NUM_SOCKETS):
            rig.leases.inside.get(timeout=WAIT_S)
        stopping = threading.Thread(target=rig.receiver.stop)
        stopping.start()
        until(lambda: rig.receiver._is_stopped, "a stop that does not begin")
        gate.let_out(8)
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
        assert not rig.receiver.is_alive
        rig.receiver.stop()  # a second time
        assert rig.leases.snapshot()[0]["received"] in range(NUM_SOCKETS, 9)
        rig.assert_books()  # no write is open
        rig.leases.cancel("r", 1)
        rig.assert_all_free()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
def test_hand_offs_at_random(context: Any, way: dict[str, Any], seals_kv: bool, seed: int) -> None:
    """Hand-offs at a time that end well, are given up on either side, meet blocks of another epoch, or lose their link."""
    rng = random.Random(seed)
    with rig_of(context, num_blocks=1024, seals_kv=seals_kv, **way) as rig:
        opened: list[tuple[str, int]] = []
        for turn in range(12):
            leases: dict[int, str] = {}
            for number in range(rng.randrange(1, 4)):
                fate = rng.choice(["commit", "commit", "cancel", "abort", "stale"])
                offer = rig.offer_of(rng.choices(range(1000), k=rng.randrange(1, 60)), f"{turn}-{number}")
                opened.append(rig.open(offer))
                (grant,) = rig.pump()
                assert isinstance(grant, Grant)
                leases[grant.lease_id] = fate
                _go_on(rig, opened[-1], fate, offer, grant)
            if rng.random() < 0.3:  # the link breaks in the middle of whatever is on its way
                rig.senders[-1].close()
                rig.transfers.on_link_lost(rig.link)
                rig.leases.abort_peer("p")
                rig.link, rig.line = rig.new_link()
                leases = dict.fromkeys(leases, "lost")
            _await_ends(rig, leases)
        rig.settle()
        assert sorted(rig.transfer_ends.released) == sorted(opened)
        assert not +rig.source.reads
        rig.assert_all_free()


def _go_on(rig: Rig, key: tuple[str, int], fate: str, offer: Any, grant: Grant) -> None:
    if fate == "stale":
        stale = rig.header(grant, offer, 0, epoch=grant.epoch - 1)
        rig.link.data.send(stale, memoryview(content_of(b"?" * 16)), None)
    rig.transfers.commit(key, SampledToken(5), 0, Timings())
    if fate == "cancel":
        rig.leases.cancel(*key)
    elif fate == "abort":
        rig.transfers.abort(key, "test")
    rig.pump()


def _await_ends(rig: Rig, leases: dict[int, str]) -> None:
    """Each of them ends once: those that nobody gives up are verified, with the right bytes in the pool."""
    until(
        lambda: rig.lease_ends.verified.qsize() + rig.lease_ends.rejected.qsize() == len(leases),
        "leases without an end",
    )
    while not rig.lease_ends.verified.empty():
        lease = rig.verdict()
        assert leases.pop(lease.lease_id) in ("commit", "stale", "lost", "cancel", "abort")
        for block_id, block_hash in zip(lease.block_ids, lease.offer.block_hashes, strict=False):
            assert bytes(rig.store.block(block_id)) == content_of(block_hash)
        rig.manager.release(Owner(OwnerKind.LEASE, lease.lease_key))
    while not rig.lease_ends.rejected.empty():
        assert leases.pop(rig.rejection().lease_id) in ("cancel", "abort", "lost")
    assert leases == {}
    rig.manager.check_integrity()
