"""A ZeroMQ socket on an asyncio loop: a callback per message, sending that never blocks.

pyzmq's own asyncio sockets make futures, and register and unregister the socket's descriptor, for every message and every
poll. With a token per message that was a good part of a token's way; here a message costs a callback.

The descriptor of a ZeroMQ socket signals edges: it says once that something has changed, and any use of the socket may
swallow that. So after each callback *and after each send* the socket is asked whether messages are left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger(__name__)

# As plain numbers: each operation on an enum's members takes longer than sending a message.
_DONTWAIT, _EVENTS, _POLLIN = int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)
_MESSAGES_AT_ONCE = 8  # before others on the loop get their turn: one may bring a token for each of hundreds of streams


class LoopSocket:
    """Owns ``socket``. ``start`` once on the running loop, ``close`` once.

    ``on_message`` gets the frames of each message on the loop. What it raises is logged, and costs no other message.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        receive: Callable[[zmq.Socket[bytes]], list[bytes]] | None = None,
    ) -> None:
        """``receive`` gets one message without waiting, or raises zmq.Again; default: its frames."""
        self._socket = socket
        self._on_message = on_message
        self._receive_one = receive or _receive_frames
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._is_due = False  # a look at the socket is scheduled
        self._is_alive = False

    def start(self) -> None:
        """Begin to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.FD
        self._loop.add_reader(self._descriptor, self._receive)
        self._is_alive = True
        self._look_soon()

    @property
    def is_alive(self) -> bool:
        """Whether messages are being received."""
        return self._is_alive

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if it cannot be queued, or the socket is closed."""
        if self._socket.closed:
            return False
        try:
            if len(frames) == 1:  # by a shorter way
                self._socket.send(frames[0], _DONTWAIT)
            else:
                self._socket.send_multipart(frames, _DONTWAIT)
        except zmq.ZMQError:  # no such peer, or its queue is full
            return False
        finally:
            if self._is_alive and not self._is_due and self._has_more():
                self._look_soon()
        return True

    def close(self, linger_ms: int) -> None:
        """Close; what is queued has ``linger_ms`` to leave."""
        self._end()
        self._socket.close(linger=linger_ms)

    def _look_soon(self) -> None:
        assert self._loop is not None
        self._is_due = True
        self._loop.call_soon(self._receive_due)

    def _receive_due(self) -> None:
        self._is_due = False
        self._receive()

    def _receive(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            if not self._is_alive:
                return  # closed since this look was scheduled
            try:
                frames = self._receive_one(self._socket)
            except zmq.Again:
                return
            except zmq.ZMQError:
                logger.exception("a socket cannot receive any more")
                self._end()
                return
            try:
                self._on_message(frames)
            except Exception:
                logger.exception("a handler failed on a message; the link goes on")
            if not self._is_alive or not self._has_more():  # asking costs less than an exception
                return
        if self._is_alive and not self._is_due:
            self._look_soon()

    def _has_more(self) -> bool:
        try:
            return bool(int(self._socket.get(_EVENTS)) & _POLLIN)
        except zmq.ZMQError:
            return True  # the next look finds out, and ends

    def _end(self) -> None:
        if self._is_alive:
            assert self._loop is not None
            self._is_alive = False
            self._loop.remove_reader(self._descriptor)


def _receive_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    return socket.recv_multipart(_DONTWAIT)
