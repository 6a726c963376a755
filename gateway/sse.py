"""Server-sent events, and the end of an answer when the client leaves."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from kvrelay.gateway.errors import ApiError, ClientBehindError, ShuttingDownError
from kvrelay.gateway.reply import Reply

# Within JSON they may stand as they are, and no event ends with one; but some clients split lines wherever Unicode sees an end.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\x85", "\u2028", "\u2029"))

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

MAX_WAITING_BYTES = 2**20  # of one stream, beside what its connection was given: some thousand events

DONE = b"data: [DONE]\n\n"  # OpenAI's last event


class ClientLeftError(Exception):
    """The client disconnected; there is nobody to answer."""


def sse(body: Any, name: str | None = None) -> bytes:
    """A server-sent event with ``body`` as JSON; ``name`` is its type, where a client looks at that."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + _json(body) + b"\n\n"


class ChunkTemplate:
    """Events that differ in the last field of their body only: what comes before it is encoded once."""

    def __init__(self, head: Mapping[str, Any], last_field: str) -> None:
        """``head``: the fields before it, at least one."""
        self._begin = b"data: " + _json(head)[:-1] + b',"' + last_field.encode() + b'":'

    def event(self, value: Any) -> bytes:
        """One with this value of the last field."""
        return self._begin + _json(value) + b"}\n\n"


def _json(body: Any) -> bytes:
    data = msgspec.json.encode(body)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return data


class EventStream:
    """An ASGI application: server-sent events. ``produce`` gives them to :meth:`write` as they come, and returns the last ones.

    It is cancelled when the client leaves. What it raises before the first event is raised to whoever sends the response, who may
    send another one; later it must not raise. ``failed`` writes the last words of a stream that is cut off.
    """

    def __init__(
        self,
        produce: Callable[[EventStream], Awaitable[bytes]],
        failed: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``headers``: what the answer's head has beside those of every stream."""
        self.has_begun = False  # there is a status, and no other answer any more
        self._produce = produce
        self._failed = failed
        self._headers = (*_HEADERS, *((name.encode(), value.encode()) for name, value in (headers or {}).items()))
        self._reply: Reply | None = None
        self._pending: list[bytes] = []  # what the client could not take at once
        self._num_pending_bytes = 0
        self._sender: asyncio.Task[None] | None = None  # while something is pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop at a disconnect. Raises ClientLeftError."""
        self._reply = send if isinstance(send, Reply) else Reply(send, scope["state"]["request_id"])
        try:
            async with EndAtDisconnect(receive):
                last_words = await self._produce(self)
                if self._sender is not None:
                    await self._sender
        except CancelledError:
            # Only a gateway that has to end, and has waited for as long as it may, cancels a request.
            if not self.has_begun:
                raise
            last_words = self._failed(ShuttingDownError())
        finally:
            self._reply.write_now()  # also if the connection is closed for an error that nobody expected
            if self._sender is not None:
                self._sender.cancel()
                await asyncio.gather(self._sender, return_exceptions=True)
        await self._send_pending(self._reply)
        await self._reply({"type": "http.response.body", "body": last_words, "more_body": False})

    def write(self, events: bytes) -> None:
        """Send ``events``, maybe none; the first call sends the head, too. What the client cannot take now waits for it.

        Raises ClientBehindError, and keeps nothing of ``events``, if MAX_WAITING_BYTES wait already.
        """
        assert self._reply is not None, "events come while the response is being sent"
        if self._sender is not None or not self._is_sent(self._reply, events):
            if self._num_pending_bytes >= MAX_WAITING_BYTES:
                raise ClientBehindError(
                    f"{self._num_pending_bytes} bytes of the answer wait for its client, and no more than {MAX_WAITING_BYTES} "
                    "may; read as fast as the answer comes, or ask for it in one piece"
                )
            self._pending.append(events)
            self._num_pending_bytes += len(events)
            self._sender = self._sender or asyncio.create_task(self._send_pending(self._reply))
        self.has_begun = True

    def _is_sent(self, reply: Reply, events: bytes) -> bool:
        """Whether it could be done at once."""
        if self.has_begun:
            return not events or reply.write(events)
        return reply.begin(self._headers, events)

    async def _send_pending(self, reply: Reply) -> None:
        if reply.status == 0:
            await reply({"type": "http.response.start", "status": 200, "headers": self._headers})
        while num_taken := len(self._pending):
            body = b"".join(self._pending)
            await reply({"type": "http.response.body", "body": body, "more_body": True})
            del self._pending[:num_taken]
            self._num_pending_bytes -= len(body)
        self._sender = None


class EndAtDisconnect:
    """What is inside is cancelled when the client leaves; then ClientLeftError comes out."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancellations = task.cancelling()
        # What is inside comes first: a request is on its way to a worker before this one has a watcher.
        self._watcher: asyncio.Task[None] | None = None
        self._starting = asyncio.get_running_loop().call_soon(self._start)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._starting.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._has_left and self._task.uncancel() <= self._num_cancellations and isinstance(error, CancelledError):
            raise ClientLeftError from error

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()
