"""Sealed blocks: a changed bit is refused, and nonces never repeat."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvrelay.common.block_digests import digests_of
from kvrelay.wire.blocks.frames import HEADER_NBYTES, SEALED_HEADER_NBYTES, BlockHeader, parse_header
from kvrelay.wire.blocks.seal import KEY_NBYTES, TAG_NBYTES, BlockOpener, BlockSealer, new_key
from kvrelay.wire.errors import BlockRefusedError

HEADER = BlockHeader(lease_id=2**40, epoch=2**63, block_index=3, payload_nbytes=8, block_hash=b"h" * 16, is_sealed=True)
PAYLOAD = memoryview(b"payload!")


def sealed_by(key: bytes, header: BlockHeader = HEADER, payload: memoryview = PAYLOAD) -> tuple[bytes, bytearray]:
    target = bytearray(len(payload) + TAG_NBYTES)
    return BlockSealer(key).seal(header, payload, memoryview(target)), target


def opens(key: bytes, header: BlockHeader, sealed: bytes | bytearray) -> bytes | None:
    target = bytearray(len(sealed) - TAG_NBYTES)
    return bytes(target) if BlockOpener(key).open(header, memoryview(sealed), memoryview(target)) else None


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
    assert num_parsed == 8 * (8 + 8 + 4 + 2 + 4 + 16)  # lease, epoch, index, piece, size, hash


def test_no_bit_of_a_plain_header_can_be_changed() -> None:
    header = replace(HEADER, is_sealed=False)
    frame = header.pack(digests_of(PAYLOAD))
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            parsed = parse_header(bytes(bad))
        except BlockRefusedError:
            continue
        assert parsed.checksum_of(digests_of(PAYLOAD)) != parsed.checksum, bit


PIECES, BLOCKS = (0, 1, 255, 256, 2**16 - 1), (0, 1, 255, 256, 2**16, 2**32 - 1)
NAMES = [replace(HEADER, piece_index=p, block_index=b) for p in PIECES for b in BLOCKS]


def test_a_nonce_is_given_once_for_each_piece_and_block() -> None:
    sealer = BlockSealer(new_key())
    for header in NAMES:
        sealer.claim(header)
    for header in NAMES:
        with pytest.raises(
            ValueError,
            match=f"piece {header.piece_index} of block {header.block_index} was sealed under this key already",
        ):
            sealer.claim(header)


def test_no_two_pieces_of_a_lease_share_a_nonce() -> None:
    """The same bytes are sealed under one key for each piece. Equal nonces would give equal ciphertexts."""
    key, zeros = new_key(), memoryview(bytes(16))
    streams = {bytes(sealed_by(key, header, zeros)[1][:16]) for header in NAMES}
    assert len(streams) == len(NAMES)
    assert sealed_by(key, NAMES[7], zeros) == sealed_by(key, NAMES[7], zeros), "a nonce depends on something else, too"


@pytest.mark.parametrize("side", [BlockSealer, BlockOpener])
def test_a_key_has_one_size(side: Any) -> None:
    """A key of 16 bytes is refused, although AES would accept it."""
    with pytest.raises(ValueError, match="a key of 16 bytes; it must have 32"):
        side(bytes(16))
    assert len(new_key()) == KEY_NBYTES
    assert new_key() != new_key()
