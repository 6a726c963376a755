"""Sealed blocks: what opens, what does not, and what becomes of the lease."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvrelay.wire.block_frames import HEADER_NBYTES, SEALED_HEADER_NBYTES, BlockHeader, parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.messages import Abort, FailureCode, Grant
from kvrelay.wire.seal import KEY_NBYTES, TAG_NBYTES, BlockOpener, BlockSealer, new_key

from .handoffs import NUM_TOKENS, commit_of, hand_over, offer_for, send_raw
from .rig import BLOCK_NBYTES, WAIT_S, content_of

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


def test_plain_and_sealed_leave_the_same_bytes_in_the_pool(rig: Any, sealed_rig: Any) -> None:
    pools = []
    for each in (rig, sealed_rig):
        lease = hand_over(each)
        pools.append([bytes(each.store.block(block_id)) for block_id in lease.block_ids])
        assert each.transfer_ends.verified == [("r", 1)]
        assert not +each.source.reads
    assert pools[0] == pools[1]
    assert pools[0][0] != bytes(BLOCK_NBYTES)


def test_a_forged_frame_costs_the_hand_off_nothing(sealed_rig: Any) -> None:
    """Somebody who may connect, and read the network, but has no key."""
    offer, grant = offer_for(sealed_rig)
    for index, key in ((0, new_key()), (0, grant.seal_key), (1, grant.seal_key), (2, grant.seal_key)):
        header = sealed_rig.header(grant, offer, index)
        frame, sealed = sealed_by(key, header, memoryview(content_of(offer.block_hashes[index])))
        send_raw(sealed_rig, frame, bytes(sealed))
        assert sealed_rig.next_block() == ("ok" if key is grant.seal_key else "bad_seal")
    sealed_rig.leases.commit("p", commit_of(offer, grant))
    lease = sealed_rig.lease_ends.verified.get(timeout=WAIT_S)
    blocks = [bytes(sealed_rig.store.block(block_id)) for block_id in lease.block_ids]
    assert blocks == [content_of(block_hash) for block_hash in offer.block_hashes]


@pytest.mark.parametrize(
    ("agreed", "key", "detail"),
    [
        (True, None, "agreed on sealed KV blocks, but granted no key"),
        (False, bytes(KEY_NBYTES), "agreed on plain KV blocks, but granted a key"),
        (True, bytes(16), "granted a key of 16 bytes; it must have 32"),
    ],
)
def test_nothing_is_shipped_under_a_grant_that_is_not_what_was_agreed(
    one_rig: Any, agreed: bool, key: bytes | None, detail: str
) -> None:
    one_rig.seals_kv = agreed
    one_rig.link, one_rig.line = one_rig.new_link()
    request = one_rig.open(one_rig.offer_of(list(range(NUM_TOKENS))))
    one_rig.transfers.blocks_ready(request, 3)
    grant = Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=1.0, seal_key=key)
    one_rig.transfers.on_message(one_rig.link, grant)
    assert one_rig.transfer_ends.failed == [(request, FailureCode.LAYOUT_MISMATCH, detail)]
    assert isinstance(one_rig.line.sent[-1], Abort)
    assert not +one_rig.source.reads
    one_rig.transfers.tick()
    assert one_rig.transfer_ends.released == [request]
