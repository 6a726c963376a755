"""Both sides of a hand-off over real data sockets, control messages passed by hand, on a clock that the test moves."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind
from kvrelay.engine.fake import MemoryStore
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.data_plane import BlockReceiver
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.lease import LeaseSettings, VerifiedLease
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.messages import Abort, Commit, FailureCode, Grant, Message, Offer, Reject, Timings, Verified
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import SendTicket
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_receiver import SharedReceiver
from kvrelay.wire.shared_sender import SharedTarget
from kvrelay.wire.transfers import DecodeLink, TransferSettings, TransferTable

Key = tuple[str, int]
WAIT_S = 10.0  # an event that has not come by then is a failure
BLOCK_SIZE = 4
BLOCK_NBYTES = 512
EPOCH = 7
TTL_S = 30.0
FINGERPRINT = b"f" * 16


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class LeaseBlocks:
    """A block manager as a lease table's BlockReservations."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def reserve(self, lease_key: str, num_blocks: int, hashes: Sequence[bytes]) -> tuple[list[int], int] | None:
        allocation = self.manager.allocate(Owner(OwnerKind.LEASE, lease_key), num_blocks, hashes)
        return None if allocation is None else (allocation.block_ids, allocation.num_cached)

    def release(self, lease_key: str) -> None:
        self.manager.release(Owner(OwnerKind.LEASE, lease_key))

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        self.manager.publish(Owner(OwnerKind.LEASE, lease_key), index, block_hash)


class CountingStore(MemoryStore):
    """A pool that knows which views are open, and hands out a *different* view object each time, as a staging pool may."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_NBYTES)
        self.reads: Counter[int] = Counter()
        self.writes: Counter[int] = Counter()
        self.num_write_opens = 0

    def open_read(self, block_id: int) -> memoryview:
        self.reads[block_id] += 1
        return super().open_read(block_id)

    def close_read(self, block_id: int) -> None:
        self.reads[block_id] -= 1

    def open_write(self, block_id: int) -> memoryview:
        self.writes[block_id] += 1
        self.num_write_opens += 1
        return super().open_write(block_id)

    def close_write(self, block_id: int) -> None:
        self.writes[block_id] -= 1


class WatchedLeases(LeaseTable):
    """A lease table that tells the test what became of every block, and can hold the receiver inside of a write."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: queue.Queue[str] = queue.Queue()  # "ok" or the refusal's cause, per block
        self.inside: queue.Queue[int] = queue.Queue()  # block index, once its write is open
        self.may_finish = threading.Event()
        self.may_finish.set()

    def begin_block(self, header: BlockHeader) -> None:
        try:
            super().begin_block(header)
        except BlockRefusedError as error:
            self.seen.put(error.cause_name)
            raise
        self.inside.put(header.block_index)

    def finish_block(self, header: BlockHeader, payload: memoryview | None) -> None:
        assert self.may_finish.wait(WAIT_S)
        try:
            super().finish_block(header, payload)
        except BlockRefusedError as error:
            self.seen.put(error.cause_name)
            raise
        self.seen.put("ok")

    def count_bad_header(self) -> None:
        super().count_bad_header()
        self.seen.put("bad_header")


@dataclass
class Rejected:
    lease_id: int
    key: Key
    code: FailureCode
    detail: str


class LeaseEnds:
    """The lease table's handler."""

    def __init__(self) -> None:
        self.verified: queue.Queue[VerifiedLease] = queue.Queue()
        self.rejected: queue.Queue[Rejected] = queue.Queue()

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        self.verified.put(lease)

    def on_lease_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        self.rejected.put(Rejected(lease_id, key, code, detail))


class TransferEnds:
    """The transfer table's handler."""

    def __init__(self) -> None:
        self.verified: list[Key] = []
        self.failed: list[tuple[Key, FailureCode, str]] = []
        self.released: list[Key] = []

    def on_verified(self, key: Key) -> None:
        self.verified.append(key)

    def on_failed(self, key: Key, code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        self.failed.append((key, code, detail))

    def on_blocks_released(self, key: Key) -> None:
        self.released.append(key)


@dataclass
class ControlLine:
    """A control link whose messages wait until the test delivers them."""

    sent: list[Message] = field(default_factory=list)
    is_up: bool = True

    def send(self, message: Message) -> bool:
        if self.is_up:
            self.sent.append(message)
        return self.is_up


class Rig:
    """A prefill side and a decode side, joined by a data socket, or by shared memory, which the decode side has beside it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        num_blocks: int = 32,
        *,
        seals_kv: bool = False,
        path: str = "tcp",
        num_sockets: int = 1,
    ) -> None:
        self.seals_kv = seals_kv
        self.path = path
        self.num_sockets = num_sockets
        self.context = context
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.decode_metrics = WireMetrics(self.registry)
        self.prefill_registry = CollectorRegistry()
        self.prefill_metrics = WireMetrics(self.prefill_registry)
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, lambda: 0.0)
        self.store = CountingStore(num_blocks)
        self.lease_ends = LeaseEnds()
        self.leases = WatchedLeases(
            LeaseSettings(
                epoch=EPOCH,
                fingerprint=FINGERPRINT,
                block_size=BLOCK_SIZE,
                ttl_s=TTL_S,
                seals_kv=seals_kv,
                num_receivers=num_sockets,
            ),
            LeaseBlocks(self.manager),
            self.store,
            self.lease_ends,
            self.decode_metrics,
            self.clock,
        )
        self.receiver = BlockReceiver(address, self.leases, BLOCK_NBYTES, context=context, num_threads=num_sockets)
        self.receiver.start()
        self.shared = SharedReceiver(
            SharedPlace(), self.leases, BLOCK_NBYTES, self.decode_metrics, num_threads=num_sockets
        )
        self.shared.start()
        self.source_manager = BlockManager(num_blocks, BLOCK_SIZE, lambda: 0.0)
        self.source = CountingStore(num_blocks)
        self.transfer_ends = TransferEnds()
        self.transfers = TransferTable(
            self.source, self.transfer_ends, TransferSettings(), self.prefill_metrics, self.clock
        )
        self.senders: list[BlockSender] = []
        self.peers = ExitStack()  # others who send
        self.link, self.line = self.new_link()

    def new_link(self, address: str | None = None) -> tuple[DecodeLink, ControlLine]:
        """A link over the rig's path, or to ``address``."""
        is_shared = address is None and self.path == "shared_memory"
        shared = SharedTarget(self.shared.name, SharedPlace(), BLOCK_NBYTES) if is_shared else None
        address = address or self.receiver.address
        self.senders.append(
            BlockSender(
                address,
                metrics=self.prefill_metrics,
                context=self.context,
                shared=shared,
                num_sockets=self.num_sockets,
            )
        )
        line = ControlLine()
        return DecodeLink(line, self.senders[-1], self.seals_kv), line

    # -- the prefill side ------------------------------------------------------------------------------------------

    def offer_of(self, token_ids: list[int], request_id: str = "r", attempt: int = 1) -> Offer:
        return offer_of(token_ids, request_id, attempt)

    def fill(self, offer: Offer) -> list[int]:
        """Source blocks for the offer, each holding bytes that depend on its hash."""
        block_ids = self.source_manager.allocate(
            Owner(OwnerKind.SEQUENCE, f"{offer.request_id}/{offer.attempt}"), len(offer.block_hashes), ()
        )
        assert block_ids is not None
        for block_id, block_hash in zip(block_ids.block_ids, offer.block_hashes, strict=True):
            self.source.block(block_id)[:] = content_of(block_hash)
        return block_ids.block_ids

    def open(self, offer: Offer) -> Key:
        key = (offer.request_id, offer.attempt)
        self.transfers.open(key, self.link, offer, self.fill(offer))
        return key

    def granted(self, num_tokens: int, request_id: str = "r") -> tuple[Key, Grant]:
        """A transfer that is granted; nothing is shipped yet."""
        key = self.open(self.offer_of(list(range(num_tokens)), request_id))
        (grant,) = self.pump()
        assert isinstance(grant, Grant)
        return key, grant

    def commit(self, key: Key) -> None:
        self.transfers.commit(key, SampledToken(5), 0, Timings())

    def header(self, grant: Grant, offer: Offer, index: int, **changes: int | bytes) -> BlockHeader:
        """A right header for the block, but for ``changes``."""
        values: dict[str, int | bytes] = {
            "lease_id": grant.lease_id,
            "epoch": grant.epoch,
            "block_index": index,
            "payload_nbytes": BLOCK_NBYTES,
            "block_hash": offer.block_hashes[min(index, len(offer.block_hashes) - 1)],
        }
        return BlockHeader(**{**values, **changes})  # type: ignore[arg-type]

    # -- between ---------------------------------------------------------------------------------------------------

    def pump(self) -> list[Message]:
        """Deliver what the prefill side said and bring the answers back; returns the answers."""
        answers: list[Message] = []
        while self.line.sent:
            message = self.line.sent.pop(0)
            match message:
                case Offer():
                    answers.append(self.leases.offer("p", message))
                    self.transfers.on_message(self.link, answers[-1])
                case Commit():
                    self.leases.commit("p", message)
                case Abort():
                    self.leases.abort("p", message)
                case _:
                    raise AssertionError(message)
        return answers

    def verdict(self) -> VerifiedLease:
        """Wait for a verified lease and tell the prefill side."""
        lease = self.lease_ends.verified.get(timeout=WAIT_S)
        self.transfers.on_message(self.link, Verified(lease_id=lease.lease_id, epoch=EPOCH))
        return lease

    def rejection(self) -> Rejected:
        """Wait for a rejected lease and tell the prefill side."""
        rejected = self.lease_ends.rejected.get(timeout=WAIT_S)
        reject = Reject(lease_id=rejected.lease_id, epoch=EPOCH, code=rejected.code, detail=rejected.detail)
        self.transfers.on_message(self.link, reject)
        return rejected

    def next_block(self) -> str:
        """Wait for the fate of one more block."""
        return self.leases.seen.get(timeout=WAIT_S)

    def wait_sent(self) -> None:
        """Wait until no send in flight reads the source pool."""
        for transfer in self.transfers._transfers.values():
            for _, ticket in transfer.tickets:
                assert_done_soon(ticket)

    def settle(self) -> None:
        """Let the transfer table notice that sends are over."""
        self.wait_sent()
        self.transfers.tick()

    def refused(self, cause: str) -> float:
        return self.registry.get_sample_value("kvrelay_refused_kv_blocks_total", {"cause": cause}) or 0.0

    def handoffs(self, outcome: str) -> float:
        return self.registry.get_sample_value("kvrelay_handoffs_total", {"outcome": outcome}) or 0.0

    def assert_all_free(self) -> None:
        """No lease holds anything, no view is open, the books balance."""
        assert self.leases.snapshot() == []
        self.assert_books()
        assert self.manager.num_allocatable == self.manager.num_blocks

    def assert_books(self) -> None:
        self.manager.check_integrity()
        assert not +self.store.writes, f"open writes: {+self.store.writes}"

    def close(self) -> None:
        self.leases.may_finish.set()
        for sender in self.senders:
            sender.close()
        self.peers.close()
        self.receiver.stop()
        self.shared.stop()
        self.assert_books()
        assert all(count >= 0 for count in self.source.reads.values())


def offer_of(token_ids: list[int], request_id: str = "r", attempt: int = 1) -> Offer:
    """What an honest prefill worker offers."""
    return Offer(
        request_id=request_id,
        attempt=attempt,
        gateway_id="g",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=8),
        block_hashes=chain_hashes(root_hash(FINGERPRINT), token_ids, BLOCK_SIZE),
    )


def content_of(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_NBYTES // len(block_hash))


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait for it."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def assert_done_soon(ticket: SendTicket) -> None:
    """Wait until nobody reads the block's memory."""
    until(lambda: ticket.is_done, "a ticket that is never done")
