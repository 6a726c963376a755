"""Packets beside a ring: what is packed is read, and everything else is named."""

from __future__ import annotations

import struct

import pytest

from kvrelay.wire.block_frames import HEADER_NBYTES
from kvrelay.wire.errors import BlockRefusedError, GreetingRefusedError
from kvrelay.wire.shared_packets import (
    MAX_ANSWER_NBYTES,
    MAX_GREETING_NBYTES,
    MAX_PACKET_NBYTES,
    Greeting,
    pack_answer,
    pack_block,
    pack_slots,
    parse_greeting,
    parse_slots,
    refusal_in,
    split_block,
)
from kvrelay.wire.shared_ring import MAX_SLOTS, RingShape

GREETING = Greeting(RingShape(4096, 8), b"t" * 64)


def test_a_greeting_is_read_as_it_was_meant() -> None:
    assert parse_greeting(GREETING.pack()) == GREETING
    assert parse_greeting(Greeting(GREETING.shape).pack()) == Greeting(GREETING.shape)
    assert len(GREETING.pack()) < MAX_GREETING_NBYTES


@pytest.mark.parametrize("packet", [b"", b"junk", GREETING.pack()[:-1], GREETING.pack() + b"t", b"\x91" * 200])
def test_what_is_no_greeting_is_refused(packet: bytes) -> None:
    with pytest.raises(GreetingRefusedError, match=f"{len(packet)} bytes that are no greeting") as refused:
        parse_greeting(packet)
    assert refused.value.cause_name == "bad_greeting"


def test_answers() -> None:
    assert refusal_in(pack_answer(None)) is None
    assert refusal_in(pack_answer("no room")) == "the decode worker refuses it: no room"
    assert len(pack_answer("x" * 10_000)) == MAX_ANSWER_NBYTES
    assert refusal_in(b"") == "the connection ended before the answer"
    assert refusal_in(b"?") == refusal_in(b"++") == "its answer is none"


def test_blocks_and_slots() -> None:
    frame = bytes(range(HEADER_NBYTES))
    assert split_block(pack_block(7, frame)) == (7, frame)
    assert len(pack_block(7, frame)) < MAX_PACKET_NBYTES
    assert split_block(struct.pack("<I", 3)) == (3, b"")
    for packet in (b"", b"\0\0\0"):
        with pytest.raises(BlockRefusedError, match=f"a packet of {len(packet)} bytes"):
            split_block(packet)
    slots = list(range(MAX_SLOTS))
    assert parse_slots(pack_slots(slots)) == slots
    assert len(pack_slots(slots)) <= MAX_ANSWER_NBYTES
    assert parse_slots(b"") == parse_slots(b"\0\0\0\0\0") == []
