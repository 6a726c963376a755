"""Server-sent events, and the end of an answer when the client leaves."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.gateway.errors import ApiError, ShuttingDownError

# Within JSON they may stand as they are, and no event ends with one; but some clients split lines wherever Unicode sees an end.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\x85", "\u2028", "\u2029"))

DONE = b"data: [DONE]\n\n"  # OpenAI's last event


class ClientLeftError(Exception):
    """The client disconnected; there is nobody to answer."""


def sse(body: Any, name: str | None = None) -> bytes:
    """A server-sent event with ``body`` as JSON; ``name`` is its type, where a client looks at that."""
    data = msgspec.json.encode(body)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + data + b"\n\n"


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client leaves.

    ``source`` is closed too: a generator that was never started does not close what it would have read. ``failed`` writes the
    last words of a stream that is cut off.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        source: AsyncGenerator[Any],
        failed: Callable[[ApiError], bytes],
        on_disconnect: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._failed = failed
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop at a disconnect."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with EndAtDisconnect(receive):
                await self._send_all(send)
        except ClientLeftError:
            self._on_disconnect()
        except CancelledError:
            # Only a gateway that has to end, and has waited for as long as it may, cancels a request.
            last_words = self._failed(ShuttingDownError())
            await send({"type": "http.response.body", "body": last_words, "more_body": False})
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            if event:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watcher.cancel()
        if self._has_left and self._task.uncancel() <= self._num_cancellations and isinstance(error, CancelledError):
            raise ClientLeftError from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()
