"""Messages over a stream socket between two processes. Each has its size before it, and is sealed between hosts."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from kvrelay.engine.ranks.seal import Seal, agree

T = TypeVar("T")

_AGREE_S = 5.0  # time for the other host to agree on a seal
_UNCONFIRMED_MS = 15_000  # a host that does not acknowledge data for so long is gone
_SIZE = struct.Struct("<I")


class Link(Generic[T]):
    """One end, which receives messages of type ``T``. Any thread may send; one thread receives."""

    def __init__(self, stream: socket.socket, kinds: Any, seal: Seal | None = None) -> None:
        """Takes over ``stream``. ``kinds``: the received messages, a union of tagged structs. ``seal``: between hosts."""
        self._stream = stream
        self._seal = seal
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._sending = threading.Lock()
        self._incoming = select.poll()
        self._incoming.register(stream, select.POLLIN)
        self._over = select.poll()
        self._over.register(stream, select.POLLRDHUP)

    @property
    def own_host(self) -> str:
        """For a link between hosts: this end's address."""
        host: str = self._stream.getsockname()[0]
        return host

    @property
    def other_host(self) -> str:
        """For a link between hosts: the other end's address."""
        host: str = self._stream.getpeername()[0]
        return host

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.send_encoded(msgspec.msgpack.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Like ``send``, for a message that is encoded once for several links."""
        with self._sending:
            data = message if self._seal is None else self._seal.close(message)
            self._stream.sendall(_SIZE.pack(len(data)) + data)

    def receive(self, timeout_s: float | None = None, *, max_bytes: int | None = None) -> T | None:
        """The next message; None if none begins to arrive in time.

        Raises EOFError if the other end is gone, cannot open its seal, or sends more than ``max_bytes``.
        """
        if not self._incoming.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size))
        if max_bytes is not None and size > max_bytes:
            raise EOFError(f"the other end sends {size} bytes where it may send {max_bytes}")
        data = self._exactly(size)
        return self._decoder.decode(data if self._seal is None else self._seal.open(data))

    def then(self, kinds: Any) -> Link[Any]:
        """The same link for messages of other ``kinds``. Do not use this object afterwards."""
        return Link(self._stream, kinds, self._seal)

    def is_over(self, timeout_s: float) -> bool:
        """Whether the other end is gone, or leaves within ``timeout_s``. Receives nothing. One thread at a time."""
        return bool(self._over.poll(timeout_s * 1000))

    def shut(self) -> None:
        """End the link for both ends."""
        with contextlib.suppress(OSError):  # the other end is already gone
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may send or receive any more."""
        self._stream.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._stream.recv_into(view)
            except OSError:  # also if the host does not answer any more
                count = 0
            if not count:
                raise EOFError("the other end is gone")
            view = view[count:]
        return data


def sealed_link(stream: socket.socket, kinds: Any, secret: bytes, *, calls: bool) -> Link[Any]:
    """One end of a TCP link to another host; both ends have the ``secret``. One end ``calls``.

    Raises OSError or EOFError; then the caller still owns ``stream``.
    """
    stream.settimeout(_AGREE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)
    link: Link[Any] = Link(stream, kinds, agree(stream, secret, calls=calls))
    stream.settimeout(None)
    return link
