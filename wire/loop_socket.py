"""A ZeroMQ socket on an asyncio loop: one callback per message, and sends that never block.

pyzmq's own asyncio sockets make futures, and register and unregister the descriptor, for every message and poll. With a message per
token this was a large part of a token's latency. Here a message costs one callback.

The descriptor of a ZeroMQ socket is edge-triggered: it signals a change once, and any use of the socket may consume the signal. So
after each callback *and each send* this class asks the socket whether it holds more messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger(__name__)

# Plain numbers, because an operation on an enum's members takes longer than sending a message.
_DONTWAIT, _EVENTS, _POLLIN = int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)
_MESSAGES_AT_ONCE = 8  # then other callbacks get a turn: one message may bring tokens of hundreds of streams


class LoopSocket:
    """Owns ``socket``. ``start`` once on the running loop, ``close`` once.

    ``on_message`` gets each message's frames, on the loop. Its exceptions are logged, and later messages still arrive.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        receive: Callable[[zmq.Socket[bytes]], list[bytes]] | None = None,
    ) -> None:
        """``receive`` returns one message without waiting, or raises zmq.Again. By default it returns the frames."""
        self._socket = socket
        self._on_message = on_message
        self._receive_one = receive or _receive_frames
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._is_due = False  # a call of ``_receive_due`` is scheduled
        self._is_alive = False

    def start(self) -> None:
        """Begin to receive on the running loop."""
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
        """Queue a message. False if the socket is closed, its queue is full, or there is no such peer."""
        if self._socket.closed:
            return False
        try:
            if len(frames) == 1:  # the faster way
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
        """Close the socket. Queued messages have ``linger_ms`` to leave."""
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
                return  # closed since this call was scheduled
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
            return True  # the next receive finds the error and ends

    def _end(self) -> None:
        if self._is_alive:
            assert self._loop is not None
            self._is_alive = False
            self._loop.remove_reader(self._descriptor)


def _receive_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    return socket.recv_multipart(_DONTWAIT)
