"""The ways that :mod:`handoff` compares: for each, a receiving and a sending process with a pool each."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq
from prometheus_client import CollectorRegistry

from handoff_parts.pools import Pool, Sizes, WholePool, geometry_of
from handoff_parts.rounds import Way, receive_rounds, send_rounds
from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.common.system import keep_freed_memory
from kvrelay.wire.blocks.pieces import whole_block
from kvrelay.wire.codec import Codec
from kvrelay.wire.leases.lease import LeaseSettings, VerifiedLease
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver
from kvrelay.wire.lines.shared.sender import SharedTarget
from kvrelay.wire.messages import Commit, FailureCode, Grant, Message, Offer, Verified
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import DecodeLink, TransferSettings

BLOCK_SIZE = 16  # tokens
FINGERPRINT = b"handoff benchmark"
EPOCH = 1
HEADER = bytes(58)  # sent by plain pyzmq before each block
PLAIN = "frames"  # its processes keep glibc's defaults; the others use the settings of kvrelay's workers
ANSWER_S = 60.0  # time limit for an answer


# -- the receiving process ---------------------------------------------------------------------------------------------


class LeaseEnds:
    """Passes the end of a lease to the main thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[VerifiedLease | str] = queue.SimpleQueue()

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """All blocks were verified."""
        self.queue.put(lease)

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        """Does not happen in a successful run."""
        self.queue.put(f"{code}: {detail}")


class KvrelayReceiver:
    """Leases and a block receiver: plain or sealed, over TCP or shared memory."""

    def __init__(
        self,
        pool: Pool,
        sizes: Sizes,
        peer: Connection,
        way: Way,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """``settle``: waits until received blocks are at their final place."""
        self._settle = settle
        self._ends, self._peer, self._codec = LeaseEnds(), peer, Codec()
        settings = LeaseSettings(
            EPOCH,
            FINGERPRINT,
            BLOCK_SIZE,
            whole_block(sizes.block_nbytes),
            ttl_s=ANSWER_S,
            seals_kv=way.seals_kv,
        )
        metrics = WireMetrics(CollectorRegistry())
        # A lease also has room for the first token after the prompt, so the pool has one more block.
        self._leases = LeaseTable(settings, WholePool(sizes.num_blocks + 1), pool, self._ends, metrics, time.monotonic)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._receiver: BlockReceiver | SharedReceiver
        if way.is_shared:
            self._receiver = SharedReceiver(
                SharedPlace(), self._leases, sizes.block_nbytes, metrics, register=pool.register
            )
            self._receiver.start()
            self.address = self._receiver.name
            return
        self._receiver = BlockReceiver("tcp://127.0.0.1:0", self._leases, sizes.block_nbytes, context=self._context)
        self._receiver.start()
        self.address = self._receiver.address

    def run(self) -> None:
        """Receive one hand-off."""
        offer = self._codec.decode(self._peer.recv_bytes())
        assert isinstance(offer, Offer)
        self._peer.send_bytes(self._codec.encode(self._leases.offer("sender", offer)))
        commit = self._codec.decode(self._peer.recv_bytes())
        assert isinstance(commit, Commit)
        self._leases.commit("sender", commit)
        lease = self._ends.queue.get(timeout=ANSWER_S)
        if isinstance(lease, str):
            raise RuntimeError(f"the hand-off was rejected: {lease}")
        if self._settle is not None:
            self._settle()
        self._peer.send_bytes(self._codec.encode(Verified(lease_id=lease.lease_id, epoch=EPOCH)))

    def close(self) -> None:
        """Stop the threads."""
        self._receiver.stop()
        self._context.destroy(linger=0)


class ZmqReceiver:
    """A PULL socket that drops all frames."""

    def __init__(self, sizes: Sizes, peer: Connection) -> None:
        self._sizes, self._peer = sizes, peer
        self._socket = zmq.Context().socket(zmq.PULL)
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Receive all blocks of a round."""
        for _ in range(self._sizes.num_blocks):
            self._socket.recv()
            self._socket.recv(copy=False)
        self._peer.send_bytes(b"")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def receive(parent: Connection, sizes: Sizes, way: Way, peer: Connection) -> None:
    """The receiving process: reports its address, then receives rounds."""
    if way.name != PLAIN:
        keep_freed_memory()
    pool = Pool(sizes)
    receiver = ZmqReceiver(sizes, peer) if way.is_plain else KvrelayReceiver(pool, sizes, peer, way)
    parent.send(receiver.address)
    receive_rounds(parent, receiver, pool.clear, pool.digest)


# -- the sending process -----------------------------------------------------------------------------------------------


class TransferEnds:
    """Receives the ends of transfers."""

    def on_verified(self, key: tuple[str, int]) -> None:
        """Do nothing: the sender reads the message itself."""

    def on_failed(self, key: tuple[str, int], code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        """Does not happen in a successful run."""
        raise RuntimeError(f"the transfer failed: {code}: {detail}")

    def on_blocks_released(self, key: tuple[str, int]) -> None:
        """Do nothing: the next round uses the pool again."""


class PipeControl:
    """The control link, as a pipe to the receiving process."""

    def __init__(self, peer: Connection) -> None:
        self._peer, self._codec = peer, Codec()

    def send(self, message: Message) -> bool:
        """Send a message."""
        self._peer.send_bytes(self._codec.encode(message))
        return True

    def recv(self) -> Message:
        """Wait for a message."""
        return self._codec.decode(self._peer.recv_bytes())


class KvrelaySender:
    """A transfer table and a block sender: plain or sealed, over TCP or shared memory."""

    def __init__(
        self,
        pool: Pool,
        sizes: Sizes,
        peer: Connection,
        address: str,
        way: Way,
    ) -> None:
        self._sizes, self._control = sizes, PipeControl(peer)
        metrics = WireMetrics(CollectorRegistry())
        # If shared memory fails, TCP goes to an address without a listener: an error, not a wrong figure.
        place = (address, SharedPlace(), sizes.block_nbytes)
        shared = SharedTarget(*place, register=pool.register) if way.is_shared else None
        address = "tcp://127.0.0.1:9" if way.is_shared else address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sender = BlockSender(address, metrics=metrics, context=self._context, shared=shared)
        self._link = DecodeLink(self._control, self._sender, way.seals_kv)
        self._transfers = TransferTable(
            pool, geometry_of(sizes, BLOCK_SIZE), TransferEnds(), TransferSettings(), metrics, time.monotonic
        )
        self._num_rounds = 0

    def run(self) -> float:
        """One hand-off, timed from when all blocks are ready."""
        self._num_rounds += 1
        key = ("r", self._num_rounds)
        tokens = [1] * (self._sizes.num_blocks * BLOCK_SIZE)
        offer = Offer(
            request_id=key[0],
            attempt=key[1],
            gateway_id="gateway",
            fingerprint=FINGERPRINT,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=SamplingParams(max_tokens=2),
            block_hashes=HashChain(FINGERPRINT, BLOCK_SIZE).hashes_of_all(tokens),
        )
        self._transfers.open(key, self._link, offer, [list(range(self._sizes.num_blocks))])
        grant = self._control.recv()
        assert isinstance(grant, Grant), grant
        self._transfers.on_message(self._link, grant)
        started_s = time.perf_counter()
        self._transfers.blocks_ready(key, self._sizes.num_blocks)
        self._transfers.commit(key, SampledToken(1), 0)
        verified = self._control.recv()
        seconds = time.perf_counter() - started_s
        assert isinstance(verified, Verified), verified
        self._transfers.on_message(self._link, verified)
        self._transfers.tick()
        return seconds

    def close(self) -> None:
        """Stop the thread."""
        self._sender.close()
        self._sender.join()
        self._context.destroy(linger=0)


class ZmqSender:
    """A PUSH socket."""

    def __init__(self, pool: Pool, sizes: Sizes, peer: Connection, address: str) -> None:
        self._pool, self._sizes, self._peer = pool, sizes, peer
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def run(self) -> float:
        """Send all blocks of a round."""
        started_s = time.perf_counter()
        for index in range(self._sizes.num_blocks):
            self._socket.send(HEADER, zmq.SNDMORE)
            self._socket.send(self._pool.open_read(index), copy=False)
        self._peer.recv_bytes()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def send(parent: Connection, sizes: Sizes, way: Way, peer: Connection) -> None:
    """The sending process: gets the receiver's address, reports its pool's digest, then sends rounds."""
    if way.name != PLAIN:
        keep_freed_memory()
    pool = Pool(sizes)
    block = secrets.token_bytes(sizes.block_nbytes)
    for index in range(sizes.num_blocks):
        pool.open_write(index)[:] = block
        pool.open_write(index)[:8] = index.to_bytes(8, "little")
    address: str = parent.recv()
    sender = ZmqSender(pool, sizes, peer, address) if way.is_plain else KvrelaySender(pool, sizes, peer, address, way)
    parent.send(pool.digest())
    send_rounds(parent, sender)
