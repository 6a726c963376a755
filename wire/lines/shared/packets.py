"""What is said on the unix socket beside a ring: packets of SOCK_SEQPACKET, each whole or not at all.

    sender → receiver    greeting in msgpack, and the ring's descriptor   once
    receiver → sender    answer: b"+", or b"-" and why not           once
    sender → receiver    slot number, block header                   for each block, behind its bytes
    receiver → sender    slot numbers                                they are free again, whatever became of their blocks

Little endian. The block header is that of the data socket (:mod:`kvrelay.wire.blocks.frames`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from kvrelay.wire.blocks.frames import HEADER_NBYTES
from kvrelay.wire.errors import BlockRefusedError, GreetingRefusedError
from kvrelay.wire.lines.shared.ring import RingShape

_SLOT = struct.Struct("<I")
_YES, _NO = b"+", b"-"
MAX_GREETING_NBYTES = 512
MAX_PACKET_NBYTES = _SLOT.size + HEADER_NBYTES + 1  # one more than one may have: longer ones show
MAX_ANSWER_NBYTES = 512


class Greeting(msgspec.Struct, frozen=True):
    """How a sender introduces its ring."""

    shape: RingShape
    token: bytes = b""  # that of the data socket, if it asks for one

    def pack(self) -> bytes:
        """The packet."""
        return msgspec.msgpack.encode(self)


def parse_greeting(packet: bytes) -> Greeting:
    """The greeting in a packet. Raises GreetingRefusedError."""
    try:
        return msgspec.msgpack.decode(packet, type=Greeting)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GreetingRefusedError("bad_greeting", f"{len(packet)} bytes that are no greeting: {error}") from error


def pack_answer(refusal: str | None) -> bytes:
    """The packet for a yes, or for a no and its reason."""
    return _YES if refusal is None else (_NO + refusal.encode())[:MAX_ANSWER_NBYTES]


def refusal_in(packet: bytes) -> str | None:
    """Why the answer is a no; None if it is a yes."""
    if packet == _YES:
        return None
    if packet[:1] == _NO:
        return f"the decode worker refuses it: {packet[1:].decode(errors='replace')}"
    return "the connection ended before the answer" if not packet else "its answer is none"


def pack_block(slot: int, frame: bytes) -> bytes:
    """The packet of a block whose header is ``frame``."""
    return _SLOT.pack(slot) + frame


def split_block(packet: bytes) -> tuple[int, bytes]:
    """Slot number and the header's frame, both unchecked. Raises BlockRefusedError (``bad_header``) on a packet too short."""
    if len(packet) < _SLOT.size:
        raise BlockRefusedError("bad_header", f"a packet of {len(packet)} bytes")
    return _SLOT.unpack_from(packet)[0], packet[_SLOT.size :]


def pack_slots(slots: Sequence[int]) -> bytes:
    """The packet by which slots come back."""
    return b"".join(map(_SLOT.pack, slots))


def parse_slots(packet: bytes) -> list[int]:
    """The slots that come back; none if the packet is not one that says so."""
    return [] if len(packet) % _SLOT.size else [slot for (slot,) in _SLOT.iter_unpack(packet)]
