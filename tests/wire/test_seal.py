"""Sealed blocks: what opens, what does not, and what becomes of the lease."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvrelay.common.sampling import SampledToken
from kvrelay.wire.block_frames import HEADER_NBYTES, SEALED_HEADER_NBYTES, BlockHeader, parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.messages import Abort, FailureCode, Grant, Timings
from kvrelay.wire.seal import KEY_NBYTES, TAG_NBYTES, BlockOpener, BlockSealer, new_key

BLOCK_NBYTES = 512
NUM_TOKENS = 10  # three blocks
HEADER = BlockHeader(lease_id=2**40, epoch=2**63, block_index=3, payload_nbytes=8, block_hash=b"h" * 16, is_sealed=True)
PAYLOAD = memoryview(b"payload!")


def sealed_by(key: bytes, header: BlockHeader = HEADER, payload: memoryview = PAYLOAD) -> tuple[bytes, bytearray]:
    target = bytearray(len(payload) + TAG_NBYTES)
    return BlockSealer(key).seal(header, payload, memoryview(target)), target


def opens(key: bytes, header: BlockHeader, sealed: bytes | bytearray) -> bytes | None:
    target = bytearray(len(sealed) - TAG_NBYTES)
    return bytes(target) if BlockOpener(key).open(header, memoryview(sealed), memoryview(target)) else None


# -- without sockets ---------------------------------------------------------------------------------------------------


def test_what_was_sealed_opens_and_shows_nothing_before() -> None:
    key = new_key()
    frame, sealed = sealed_by(key)
    assert len(frame) == SEALED_HEADER_NBYTES != HEADER_NBYTES
    assert bytes(PAYLOAD) not in bytes(sealed)
    assert opens(key, parse_header(frame), sealed) == PAYLOAD


def test_no_bit_of_the_payload_or_the_tag_can_be_changed() -> None:
    key = new_key()
    _, sealed = sealed_by(key)
    for bit in range(8 * len(sealed)):
        bad = bytearray(sealed)
        bad[bit // 8] ^= 1 << bit % 8
        assert opens(key, HEADER, bad) is None, bit


def test_no_bit_of_the_header_can_be_changed() -> None:
    key = new_key()
    frame, sealed = sealed_by(key)
    num_parsed = 0
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            header = parse_header(bytes(bad))
        except BlockRefusedError as error:
            assert error.cause_name == "bad_header"  # noqa: PT017
            continue
        num_parsed += 1
        assert opens(key, header, sealed) is None, bit
    assert num_parsed == 8 * (8 + 8 + 4 + 8 + 16)  # lease, epoch, index, size, hash


def test_no_bit_of_a_plain_header_can_be_changed() -> None:
    header = replace(HEADER, is_sealed=False)
    frame = header.pack(PAYLOAD)
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            parsed = parse_header(bytes(bad))
        except BlockRefusedError:
            continue
        assert parsed.checksum_of(PAYLOAD) != parsed.checksum, bit


def test_another_key_opens_nothing() -> None:
    _, sealed = sealed_by(new_key())
    assert opens(new_key(), HEADER, sealed) is None


def test_one_blocks_payload_does_not_open_under_anothers_header() -> None:
    key = new_key()
    _, sealed = sealed_by(key)
    assert opens(key, replace(HEADER, block_index=4), sealed) is None
    assert opens(key, replace(HEADER, block_hash=b"i" * 16), sealed) is None
    assert opens(key, replace(HEADER, lease_id=1), sealed) is None


def test_a_nonce_is_given_once() -> None:
    sealer = BlockSealer(new_key())
    sealer.claim(3)
    sealer.claim(4)
    with pytest.raises(ValueError, match="block 3 was sealed under this key already"):
        sealer.claim(3)


@pytest.mark.parametrize("side", [BlockSealer, BlockOpener])
def test_a_key_has_one_size(side: Any) -> None:
    """AES would take 16 bytes too."""
    with pytest.raises(ValueError, match="a key of 16 bytes; it must have 32"):
        side(bytes(16))
    assert len(new_key()) == KEY_NBYTES
    assert new_key() != new_key()


# -- over sockets ------------------------------------------------------------------------------------------------------


def hand_over(rig: Any) -> Any:
    key, _ = rig.granted(NUM_TOKENS)
    rig.transfers.commit(key, SampledToken(5), 0, Timings())
    rig.pump()
    lease = rig.verdict()
    rig.settle()
    return lease


def test_plain_and_sealed_leave_the_same_bytes_in_the_pool(rig: Any, sealed_rig: Any) -> None:
    pools = []
    for each in (rig, sealed_rig):
        lease = hand_over(each)
        pools.append([bytes(each.store.block(block_id)) for block_id in lease.block_ids])
        assert each.transfer_ends.verified == [("r", 1)]
        assert not +each.source.reads
    assert pools[0] == pools[1]
    assert pools[0][0] != bytes(BLOCK_NBYTES)


def test_every_lease_has_a_key_of_its_own(sealed_rig: Any) -> None:
    grants = [sealed_rig.granted(NUM_TOKENS, name)[1] for name in "ab"]
    assert all(len(grant.seal_key) == KEY_NBYTES for grant in grants)
    assert grants[0].seal_key != grants[1].seal_key


class Sender:
    """A sender of the test's making, who holds the lease's key."""

    def __init__(self, rig: Any, request_id: str = "r") -> None:
        self.rig = rig
        self.offer = rig.offer_of(list(range(NUM_TOKENS)), request_id)
        self.grant = rig.leases.offer("p", self.offer)
        assert isinstance(self.grant, Grant)

    def sealed(self, index: int, key: bytes | None = None, **changes: Any) -> list[bytes]:
        header = self.rig.header(self.grant, self.offer, index, **changes)
        frame, sealed = sealed_by(key or self.grant.seal_key, header, memoryview(bytes([index]) * BLOCK_NBYTES))
        return [frame, bytes(sealed)]

    def send(self, frames: list[bytes]) -> str:
        """What became of the block."""
        with self.rig.context.socket(zmq.DEALER) as socket:
            socket.linger = 1000
            socket.connect(self.rig.receiver.address)
            socket.send_multipart(frames)
            return str(self.rig.next_block())


def flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


LIES = {
    "payload": ("bad_seal", lambda sender: [sender.sealed(1)[0], flip(sender.sealed(1)[1], 100)]),
    "tag": ("bad_seal", lambda sender: [sender.sealed(1)[0], flip(sender.sealed(1)[1], BLOCK_NBYTES)]),
    "hash": ("wrong_block", lambda sender: sender.sealed(1, block_hash=b"x" * 16)),
    "header": ("wrong_block", lambda sender: [flip(sender.sealed(1)[0], 45), sender.sealed(1)[1]]),
    "key": ("bad_seal", lambda sender: sender.sealed(1, key=new_key())),
    "swapped": ("bad_seal", lambda sender: [sender.sealed(1)[0], sender.sealed(2)[1]]),
    "truncated": ("bad_size", lambda sender: [sender.sealed(1)[0], sender.sealed(1)[1][:-1]]),
    "no tag": ("bad_size", lambda sender: [sender.sealed(1)[0], bytes(BLOCK_NBYTES)]),
    "empty": ("bad_size", lambda sender: [sender.sealed(1)[0], b""]),
    "three parts": ("bad_size", lambda sender: [*sender.sealed(1), b""]),
    "plain": (
        "wrong_seal",
        lambda sender: [
            sender.rig.header(sender.grant, sender.offer, 1).pack(memoryview(bytes(BLOCK_NBYTES))),
            bytes(BLOCK_NBYTES),
        ],
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_lease_and_its_blocks_go_back(sealed_rig: Any, lie: str) -> None:
    cause, frames = LIES[lie]
    sender = Sender(sealed_rig)
    assert sender.send(sender.sealed(0)) == "ok"
    assert sender.send(frames(sender)) == cause
    rejected = sealed_rig.lease_ends.rejected.get(timeout=10)
    assert rejected.code is FailureCode.INTEGRITY
    assert sealed_rig.refused(cause) == 1
    sealed_rig.assert_all_free()
    assert sender.send(sender.sealed(1)) == "unknown_lease"


def test_a_block_that_comes_again_is_dropped_before_it_is_opened(sealed_rig: Any) -> None:
    """A replay neither overwrites the block nor ends the lease."""
    sender = Sender(sealed_rig)
    frames = sender.sealed(0)
    assert sender.send(frames) == "ok"
    num_opens = sealed_rig.store.num_write_opens
    assert sender.send(frames) == "duplicate"
    assert sealed_rig.refused("duplicate") == 1
    assert sealed_rig.store.num_write_opens == num_opens
    assert sender.send(sender.sealed(1)) == "ok"
    sealed_rig.leases.cancel("r", 1)


def test_another_leases_block_does_not_pass(sealed_rig: Any) -> None:
    """Same tokens, same epoch, and the header rewritten to the other lease: the key is not this lease's."""
    first, second = Sender(sealed_rig, "a"), Sender(sealed_rig, "b")
    _, payload = first.sealed(0)
    frame, _ = second.sealed(0)
    assert second.send([frame, payload]) == "bad_seal"
    assert sealed_rig.lease_ends.rejected.get(timeout=10).key == ("b", 1)
    assert first.send(first.sealed(0)) == "ok"
    sealed_rig.leases.cancel("a", 1)


def test_a_sealed_block_does_not_pass_a_plain_lease(rig: Any) -> None:
    sender = Sender(rig)
    assert sender.grant.seal_key is None
    assert sender.send(sender.sealed(0, key=new_key())) == "wrong_seal"
    assert rig.lease_ends.rejected.get(timeout=10).code is FailureCode.INTEGRITY


@pytest.mark.parametrize(
    ("agreed", "key", "detail"),
    [
        (True, None, "agreed on sealed KV blocks, but granted no key"),
        (False, bytes(KEY_NBYTES), "agreed on plain KV blocks, but granted a key"),
        (True, bytes(16), "granted a key of 16 bytes; it must have 32"),
    ],
)
def test_nothing_is_shipped_under_a_grant_that_is_not_what_was_agreed(
    rig: Any, agreed: bool, key: bytes | None, detail: str
) -> None:
    rig.seals_kv = agreed
    rig.link, rig.line = rig.new_link()
    request = rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    rig.transfers.blocks_ready(request, 3)
    grant = Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=1.0, seal_key=key)
    rig.transfers.on_message(rig.link, grant)
    assert rig.transfer_ends.failed == [(request, FailureCode.LAYOUT_MISMATCH, detail)]
    assert isinstance(rig.line.sent[-1], Abort)
    assert not +rig.source.reads
    rig.transfers.tick()
    assert rig.transfer_ends.released == [request]
