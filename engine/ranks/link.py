"""Messages over a stream socket between two processes of one host. Each is preceded by its size."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_SIZE = struct.Struct("<I")


class Link(Generic[T]):
    """One end, which receives messages of type ``T``. Sends on any thread, receives on one."""

    def __init__(self, stream: socket.socket, kinds: Any) -> None:
        """Takes ``stream`` over. ``kinds``: of what is received, a union of tagged structs."""
        self._stream = stream
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._sending = threading.Lock()
        self._incoming = select.poll()
        self._incoming.register(stream, select.POLLIN)
        self._over = select.poll()
        self._over.register(stream, select.POLLRDHUP)

    def send(self, message: Any) -> None:
        """Raises OSError if the other end is gone."""
        self.send_encoded(msgspec.msgpack.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """The same, of a message that goes to several."""
        with self._sending:
            self._stream.sendall(_SIZE.pack(len(message)) + message)

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message; None if none has begun to come in time. Raises EOFError if the other end is gone."""
        if not self._incoming.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size))
        return self._decoder.decode(self._exactly(size))

    def is_over(self, timeout_s: float) -> bool:
        """Whether the other end is gone, or goes in the meantime. Receives nothing; any one thread."""
        return bool(self._over.poll(timeout_s * 1000))

    def shut(self) -> None:
        """Both ends hear that it is over."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Nobody sends or receives any more."""
        self._stream.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._stream.recv_into(view)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError("the other end is gone")
            view = view[count:]
        return data
