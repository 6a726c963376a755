"""The packets on the unix socket beside a ring. The socket is SOCK_SEQPACKET: each packet arrives whole or not at all.

    sender → receiver    greeting in msgpack, and the ring's descriptor   once
    receiver → sender    answer: b"+", or b"-" and the reason        once
    sender → receiver    slot number, block header                   for each block, once its bytes are in the slot
    receiver → sender    slot numbers                                these slots are free again, also after a refused block

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
MAX_PACKET_NBYTES = _SLOT.size + HEADER_NBYTES + 1  # one byte more than a valid packet has: reveals longer ones
MAX_ANSWER_NBYTES = 512


class Greeting(msgspec.Struct, frozen=True):
    """A sender's first packet: the shape of its ring."""

    shape: RingShape
    token: bytes = b""  # the data socket's token, if it asks for one

    def pack(self) -> bytes:
        """The greeting as a packet."""
        return msgspec.msgpack.encode(self)


def parse_greeting(packet: bytes) -> Greeting:
    """Decode a greeting. Raises GreetingRefusedError if the packet holds none."""
    try:
        return msgspec.msgpack.decode(packet, type=Greeting)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GreetingRefusedError("bad_greeting", f"{len(packet)} bytes that are no greeting: {error}") from error


def pack_answer(refusal: str | None) -> bytes:
    """The packet that accepts a greeting (``refusal`` is None) or refuses it with a reason."""
    return _YES if refusal is None else (_NO + refusal.encode())[:MAX_ANSWER_NBYTES]


def refusal_in(packet: bytes) -> str | None:
    """The reason in an answer that refuses; None if the answer accepts."""
    if packet == _YES:
        return None
    if packet[:1] == _NO:
        return f"the decode worker refuses it: {packet[1:].decode(errors='replace')}"
    return "the connection ended before the answer" if not packet else "its answer is none"


def pack_block(slot: int, frame: bytes) -> bytes:
    """The packet of a block whose header is ``frame``."""
    return _SLOT.pack(slot) + frame


def split_block(packet: bytes) -> tuple[int, bytes]:
    """Slot number and header frame, both unchecked. Raises BlockRefusedError (``bad_header``) if the packet is too short."""
    if len(packet) < _SLOT.size:
        raise BlockRefusedError("bad_header", f"a packet of {len(packet)} bytes")
    return _SLOT.unpack_from(packet)[0], packet[_SLOT.size :]


def pack_slots(slots: Sequence[int]) -> bytes:
    """The packet that gives slots back."""
    return b"".join(map(_SLOT.pack, slots))


def parse_slots(packet: bytes) -> list[int]:
    """The slots that a packet gives back; empty if the packet is malformed."""
    return [] if len(packet) % _SLOT.size else [slot for (slot,) in _SLOT.iter_unpack(packet)]
