"""One request's answer on its way out: ASGI's ``send`` with what every answer has, and a shorter way for streams.

ASGI sends by coroutines, and so by tasks. For a stream of tokens that is too long a way: an :class:`Exchange` writes to the
connection in the very call that brings a first token, and just behind what brings more (:mod:`kvrelay.gateway.gathered_writes`). It
refuses if the client is behind: then ``send``, which waits, is the way.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message, Send

from kvrelay.gateway.http_protocol import Exchange

Headers = Iterable[tuple[bytes, bytes]]


class Reply:
    """What an application sends by. Adds the request's id to the head, and remembers the status."""

    def __init__(
        self, send: Send, request_id: str, exchange: Exchange | None = None, *, begins_by_send: bool = False
    ) -> None:
        """``exchange``: the short way, if there is one. ``begins_by_send``: not for the head, to which CORS adds its own."""
        self.status = 0  # until the head is sent
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._exchange = exchange
        self._begins_by_send = begins_by_send

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), self._id]
        else:
            self.write_now()
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]

    def begin(self, headers: Headers, body: bytes) -> bool:
        """Send head and first part now, or do nothing and return False."""
        if self._exchange is None or self._begins_by_send or not self._exchange.begin((*headers, self._id), body):
            return False
        self.status = 200
        return True

    def write(self, body: bytes) -> bool:
        """Send a part that is not empty soon, or do nothing and return False."""
        return self._exchange is not None and self._exchange.write(body)

    def write_now(self) -> None:
        """What was written reaches the connection before anything else can happen to it."""
        if self._exchange is not None:
            self._exchange.write_now()
