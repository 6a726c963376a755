"""Greetings, commands and frames of ZMTP 3.1 (RFC 37) as bytes, for peers that break the protocol as libzmq never does."""

from __future__ import annotations

import struct

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame


def greeting(mechanism: bytes = b"NULL", *, as_server: bool = False) -> bytes:
    """The first 64 bytes of a connection."""
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(body: bytes, *, has_more: bool = False) -> bytes:
    """A message's frame, short or long."""
    return frame_head(len(body), has_more=has_more) + body


def frame_head(nbytes: int, *, has_more: bool = False, is_command: bool = False) -> bytes:
    """The head of a frame of ``nbytes``, in the long form from 256 bytes on."""
    flags = (_MORE if has_more else 0) | (_COMMAND if is_command else 0)
    return bytes([flags, nbytes]) if nbytes < 256 else bytes([flags | _LONG]) + struct.pack(">Q", nbytes)


def command(name: bytes, data: bytes) -> bytes:
    """A command, such as READY."""
    body = bytes([len(name)]) + name + data
    return frame_head(len(body), is_command=True) + body


def ready(socket_type: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """The command by which a peer without keys ends its handshake."""
    properties = ((b"Socket-Type", socket_type), (b"Identity", identity))
    data = b"".join(bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in properties)
    return command(b"READY", data)
