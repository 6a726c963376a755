"""Both sides of a hand-off over real data sockets. The test passes the control messages and moves the clock."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver
from kvrelay.wire.lines.shared.sender import SharedTarget
from kvrelay.wire.messages import Abort, Commit, FailureCode, Grant, Message, Offer, Reject, Verified
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import DecodeLink, TransferSettings

from .lease_bench import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    EPOCH,
    GEOMETRY,
    NUM_TOKENS,
    WAIT_S,
    Key,
    LeaseBench,
    Rejected,
    content_of,
    offer_of,
)
from .sending import assert_all_done_soon
from .shared_peer import SharedPeer

STRANGER_S = 60.0  # longer than a test: only tests about silence let it pass


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

    @property
    def failures(self) -> list[FailureCode]:
        return [code for _, code, _ in self.failed]


@dataclass
class ControlLine:
    """A control link whose messages wait until the test delivers them."""

    sent: list[Message] = field(default_factory=list)
    is_up: bool = True

    def send(self, message: Message) -> bool:
        if self.is_up:
            self.sent.append(message)
        return self.is_up


class Rig(LeaseBench):
    """A prefill side and a decode side, joined by a data socket or by shared memory. The decode side listens on both."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str = "tcp://127.0.0.1:0",
        num_blocks: int = 32,
        *,
        seals_kv: bool = False,
        path: str = "tcp",
    ) -> None:
        super().__init__(num_blocks, seals_kv=seals_kv)
        self.seals_kv = seals_kv
        self.path = path
        self.context = context
        self.prefill_registry = CollectorRegistry()
        self.prefill_metrics = WireMetrics(self.prefill_registry)
        self.receiver = BlockReceiver(address, self.table, BLOCK_NBYTES, context=context)
        self.receiver.start()
        self.shared = SharedReceiver(
            SharedPlace(), self.table, BLOCK_NBYTES, self.metrics, register=self.store.register, stranger_s=STRANGER_S
        )
        self.shared.start()
        self.source_manager = BlockManager(num_blocks, BLOCK_SIZE, lambda: 0.0)
        self.source = self.new_store(num_blocks)
        self.transfer_ends = TransferEnds()
        self.transfers = TransferTable(
            self.source, GEOMETRY, self.transfer_ends, TransferSettings(), self.prefill_metrics, self.clock
        )
        self.senders: list[BlockSender] = []
        self.peers = ExitStack()  # other senders
        self.link, self.line = self.new_link()

    def new_link(self, address: str | None = None) -> tuple[DecodeLink, ControlLine]:
        """A link over the rig's path, or to ``address``."""
        is_shared = address is None and self.path == "shared_memory"
        place = (self.shared.name, SharedPlace(), BLOCK_NBYTES)
        shared = SharedTarget(*place, register=self.source.register) if is_shared else None
        self.senders.append(
            BlockSender(
                address or self.receiver.address,
                metrics=self.prefill_metrics,
                context=self.context,
                shared=shared,
            )
        )
        line = ControlLine()
        return DecodeLink(line, self.senders[-1], self.seals_kv), line

    # -- the prefill side ------------------------------------------------------------------------------------------

    def open(self, offer: Offer, link: DecodeLink | None = None) -> Key:
        """Open a transfer. The bytes of each source block depend on its hash."""
        key = (offer.request_id, offer.attempt)
        owner = Owner(OwnerKind.SEQUENCE, f"{offer.request_id}/{offer.attempt}")
        allocation = self.source_manager.allocate(owner, len(offer.block_hashes), ())
        assert allocation is not None
        for block_id, block_hash in zip(allocation.block_tables[0], offer.block_hashes, strict=True):
            self.source.block(block_id)[:] = content_of(block_hash)
        self.transfers.open(key, link or self.link, offer, allocation.block_tables)
        return key

    def granted(self, num_tokens: int = NUM_TOKENS, request_id: str = "r") -> tuple[Key, Grant]:
        """A granted transfer, of which no block is sent yet."""
        key = self.open(offer_of(list(range(num_tokens)), request_id))
        (grant,) = self.pump()
        assert isinstance(grant, Grant)
        return key, grant

    def commit(self, key: Key) -> None:
        self.transfers.commit(key, SampledToken(5), 0)

    def hand_over(self, num_tokens: int = NUM_TOKENS, request_id: str = "r") -> VerifiedLease:
        """Run a whole hand-off. The blocks of the verified lease are still leased."""
        key, _ = self.granted(num_tokens, request_id)
        return self.complete(key)

    def complete(self, key: Key) -> VerifiedLease:
        """Commit a granted transfer and wait until it is verified."""
        self.commit(key)
        self.pump()
        lease = self.verdict()
        self.settle()
        return lease

    def lose_link(self) -> None:
        """Close the link's sender, and tell the prefill side that the link is lost."""
        self.senders[0].close()
        self.senders[0].join()
        self.transfers.on_link_lost(self.link)
        self.settle()

    def send(self, *frames: bytes) -> None:
        """Send frames as any peer might. Through shared memory there must be two frames."""
        if self.path == "shared_memory":
            peer = self.peers.enter_context(
                SharedPeer(self.shared.name)
            )  # open until the end: closing could drop the packet
            assert peer.greet(BLOCK_NBYTES) is None
            peer.send(0, *frames)
            return
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = int(WAIT_S * 1000)
            socket.connect(self.receiver.address)
            socket.send_multipart(frames)

    # -- between ---------------------------------------------------------------------------------------------------

    def pump(self) -> list[Message]:
        """Deliver the prefill side's messages and the answers to them. Returns the answers."""
        answers: list[Message] = []
        while self.line.sent:
            message = self.line.sent.pop(0)
            match message:
                case Offer():
                    answers.append(self.table.offer("p", message))
                    self.transfers.on_message(self.link, answers[-1])
                case Commit():
                    self.table.commit("p", message)
                case Abort():
                    self.table.abort("p", message)
                case _:
                    raise AssertionError(message)
        return answers

    def verdict(self) -> VerifiedLease:
        """Wait for a verified lease and tell the prefill side."""
        lease = self.ends.verified.get(timeout=WAIT_S)
        self.transfers.on_message(self.link, Verified(lease_id=lease.lease_id, epoch=EPOCH))
        return lease

    def rejection(self) -> Rejected:
        """Wait for a rejected lease and tell the prefill side."""
        rejected = self.ends.rejected.get(timeout=WAIT_S)
        reject = Reject(lease_id=rejected.lease_id, epoch=EPOCH, code=rejected.code, detail=rejected.detail)
        self.transfers.on_message(self.link, reject)
        return rejected

    def next_block(self) -> str:
        """Wait for the fate of one more block."""
        return self.table.seen.get(timeout=WAIT_S)

    def wait_sent(self) -> None:
        """Wait until no send in flight reads the source pool."""
        transfers = self.transfers._transfers.values()
        assert_all_done_soon([ticket for transfer in transfers for _, ticket in transfer.tickets])

    def settle(self) -> None:
        """Let the transfer table notice that sends are over."""
        self.wait_sent()
        self.transfers.tick()

    def close(self) -> None:
        self.table.may_finish.set()
        for sender in self.senders:
            sender.close()
            sender.join()
        self.peers.close()
        self.receiver.stop()
        self.shared.stop()
        self.assert_books()
        assert all(count >= 0 for count in self.source.reads.values())
