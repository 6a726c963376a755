"""Frames at the block receivers: right ones, almost right ones and nonsense, for leases that are live, plain and sealed.

Whoever sends them has no key and recomputes no checksum: what is changed is changed by accident or by a stranger. Whatever comes, a
lease that gets verified has exactly the bytes in its memory that its honest sender computed, and the hand-off next door goes on.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.worker import LeasedBlocks
from kvrelay.engine.block_manager import BlockManager
from kvrelay.engine.fake import MemoryStore
from kvrelay.wire.block_frames import BlockHeader, parse_header
from kvrelay.wire.data_plane import BlockReceiver
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.lease import LeaseSettings, VerifiedLease
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.messages import Commit, FailureCode, Grant, Offer, Timings
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import TAG_NBYTES, BlockSealer

from .control_rigs import BLOCK_NBYTES, BLOCK_SIZE, EPOCH, FINGERPRINT, VOCAB, offer_of
from .findings import Findings
from .fuzz_slots import SlotFuzz
from .mutator import Mutator

NUM_BLOCKS = 64
_SOON_MS = 2000
_SOCKET_SHARE = 0.05  # of the frames takes the way over a socket
_SLOT_SHARE = 0.2  # and through shared memory


@dataclass(frozen=True, slots=True)
class _HandOff:
    """One lease, and the frames by which its honest sender would fill it."""

    offer: Offer
    lease_id: int
    blocks: list[bytes]
    frames: list[tuple[bytes, bytes]]

    @property
    def commit(self) -> Commit:
        return Commit(
            lease_id=self.lease_id,
            epoch=EPOCH,
            chain_hash=self.offer.block_hashes[-1],
            first_token=SampledToken(1),
            num_cached_tokens=0,
            timings=Timings(),
        )


class BlockFuzz:
    """A lease table and a receiver, and three hand-offs at a time that are lied about."""

    def __init__(self, rng: random.Random, *, is_sealed: bool) -> None:
        self._rng = rng
        self._is_sealed = is_sealed
        self._mutator = Mutator(rng)
        self.findings = Findings()
        self._manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, lambda: 0.0)
        self._store = MemoryStore(NUM_BLOCKS, BLOCK_NBYTES)
        self._leased = LeasedBlocks(self._manager)
        settings = LeaseSettings(EPOCH, FINGERPRINT, BLOCK_SIZE, 30.0, seals_kv=is_sealed)
        metrics = WireMetrics(CollectorRegistry())
        self._leases = LeaseTable(settings, self._leased, self._store, self, metrics, lambda: 0.0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"inproc://fuzzed-{id(self)}"
        self._receiver = BlockReceiver(address, self._leases, BLOCK_NBYTES, context=self._context)
        self._receiver._socket.rcvtimeo = _SOON_MS  # what waits for a part that never comes is a finding, not a hang
        self._sender = self._context.socket(zmq.DEALER)
        self._sender.linger = 0
        self._sender.connect(address)
        self._slots = SlotFuzz(self._leases, BLOCK_NBYTES, rng, self._mutator)
        self._number = 0
        self._hand_offs: dict[int, _HandOff] = {}
        self._ended: set[int] = set()
        self.num_verified = self.num_rejected = self.num_refused = self.num_landed = 0

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """As LeaseHandler: the bytes, at the moment from which they would be read."""
        blocks = self._hand_offs.pop(lease.lease_id).blocks
        for index, block in enumerate(blocks):
            assert bytes(self._store.block(lease.block_ids[index])) == block, f"block {index} holds other bytes"
        self.num_verified += 1
        self._leased.release(lease.lease_key)

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        """As LeaseHandler."""
        del self._hand_offs[lease_id]
        self._ended.add(lease_id)
        self.num_rejected += 1

    def batch(self, num_frames: int = 300) -> int:
        """An honest hand-off with ``num_frames`` other frames in its middle; returns how many frames it was."""
        honest = self._begin()
        rest = list(honest.frames)
        self._receive(*rest.pop())
        for _ in range(num_frames):
            # With seals the honest one is lied about, too: who cannot seal, ends nothing.
            targets = [one for one in self._hand_offs.values() if self._is_sealed or one is not honest]
            while len(targets) < 3:
                targets.append(self._begin())
            self._lie(targets, honest.lease_id)
        for header, payload in rest:
            self._receive(header, payload)
        self._leases.commit("p", honest.commit)
        assert honest.lease_id not in self._hand_offs, "the honest hand-off was not verified"
        assert honest.lease_id not in self._ended, "the honest hand-off was ended"
        self._manager.check_integrity()
        assert {entry["lease_id"] for entry in self._leases.snapshot()} == set(self._hand_offs)
        return num_frames

    def close(self) -> None:
        """End all leases; nothing may be left of them."""
        self._leases.abort_peer("p")
        self._manager.check_integrity()
        assert self._manager.num_allocatable == NUM_BLOCKS
        self._sender.close()
        self._slots.close()
        self._receiver.stop()
        self._context.term()

    def told(self) -> str:
        """What became of it."""
        return (
            f"{self.num_verified} leases verified, {self.num_rejected} ended by a lie, {self.num_landed} blocks taken, "
            f"{self.num_refused} refused"
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self) -> _HandOff:
        self._number += 1
        tokens = [self._number % VOCAB, self._number // VOCAB % VOCAB, self._number // VOCAB**2]
        tokens += [self._rng.randrange(VOCAB) for _ in range(self._rng.randrange(1, 18))]
        offer = offer_of(f"r{self._number}", tokens, "g", 4)
        grant = self._leases.offer("p", offer)
        assert isinstance(grant, Grant), grant
        sealer = None if grant.seal_key is None else BlockSealer(grant.seal_key)
        blocks = [self._rng.randbytes(BLOCK_NBYTES) for _ in offer.block_hashes]
        frames: list[tuple[bytes, bytes]] = []
        for index, block in enumerate(blocks):
            header = BlockHeader(grant.lease_id, EPOCH, index, BLOCK_NBYTES, offer.block_hashes[index])
            if sealer is None:
                frames.append((header.pack(memoryview(block)), block))
            else:
                sealed = bytearray(BLOCK_NBYTES + TAG_NBYTES)
                frames.append((sealer.seal(header, memoryview(block), memoryview(sealed)), bytes(sealed)))
        hand_off = _HandOff(offer, grant.lease_id, blocks, frames)
        self._hand_offs[grant.lease_id] = hand_off
        return hand_off

    def _lie(self, targets: Sequence[_HandOff], spared: int) -> None:
        """One frame: right, changed, mixed from two, or nonsense; and now and then a commit."""
        rng = self._rng
        one, other = rng.choice(targets), rng.choice(targets)
        header, payload = rng.choice(one.frames)
        way = rng.random()
        if way < 0.25:
            header = self._mutator.mutate([header])
        elif way < 0.30:
            payload = self._mutator.mutate([payload, rng.choice(other.frames)[1]])
        elif way < 0.32:
            payload = rng.choice(other.frames)[1]
        elif way < 0.45:
            header = self._changed(header, other)
        elif way < 0.50:
            header, payload = self._mutator.mutate([header, payload]), self._mutator.mutate([header, payload])
        elif way < 0.55:
            self._leases.commit("p", one.commit)
        if self._names(header, spared):
            return  # who names a live plain lease, by its number and epoch, and lies, ends it: that is how it is meant
        way = rng.random()
        if way < _SLOT_SHARE:
            send = functools.partial(self._slots.send, header, payload, lambda frame: self._names(frame, spared))
            self.findings.of(
                rng.choice([self._slots.greet, *[send] * 9]), lambda: f"a slot: {header.hex()} {payload.hex()}"
            )
        elif way < _SLOT_SHARE + _SOCKET_SHARE:
            parts = [[header, payload], [header], [header, payload, payload], [header, b""], [payload, header]]
            self.findings.of(lambda: self._receive_over_socket(rng.choice(parts)), header.hex)
        else:
            self.findings.of(lambda: self._receive(header, payload), lambda: f"{header.hex()} {payload.hex()}")

    def _changed(self, header: bytes, other: _HandOff) -> bytes:
        """Well formed, with one field of another lease, another block or another time. The checksum stays as it was."""
        parsed = parse_header(header)
        values = {
            "lease_id": parsed.lease_id,
            "epoch": parsed.epoch,
            "block_index": parsed.block_index,
            "payload_nbytes": parsed.payload_nbytes,
            "block_hash": parsed.block_hash,
        }
        changes: list[tuple[str, int | bytes]] = [
            ("lease_id", other.lease_id),
            ("lease_id", 2**64 - 1),
            ("epoch", EPOCH + 1),
            ("block_index", 2**32 - 1),
            ("block_index", self._rng.randrange(6)),
            ("payload_nbytes", 2**64 - 1),
            ("block_hash", self._rng.choice(other.offer.block_hashes)),
        ]
        name, value = self._rng.choice(changes)
        changed = BlockHeader(**{**values, name: value})  # type: ignore[arg-type]
        return changed.pack_sealed() if parsed.is_sealed else changed._fields(1) + header[-8:]

    def _names(self, header: bytes, lease_id: int) -> bool:
        """Whether a frame must not be sent, for it could end that lease."""
        if self._is_sealed:
            return False
        try:
            return parse_header(header).lease_id == lease_id
        except BlockRefusedError:
            return False

    def _receive(self, frame: bytes, payload: bytes) -> None:
        """As BlockReceiver does."""
        try:
            header = parse_header(frame)
            self._leases.begin_block(header)
            self._leases.finish_block(header, memoryview(payload))
        except BlockRefusedError:
            self.num_refused += 1
            return
        self.num_landed += 1

    def _receive_over_socket(self, parts: Sequence[bytes]) -> None:
        self._sender.send_multipart(parts)
        self._receiver._receive_one()
        assert not self._receiver._socket.poll(0), "a part of a message was left"
