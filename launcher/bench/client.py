"""Sends one request to an OpenAI-compatible server, streams the answer, and notes when each chunk with content came.

Supports ``/v1/completions`` and ``/v1/chat/completions``. A chunk counts if it brings text. It also counts if it brings a token
without text, such as an incomplete character or a special token. Chunks with only a role or only usage do not count.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from kvrelay.launcher.bench.http_stream import Connection, ServerAddress
from kvrelay.launcher.bench.records import SHORT_ANSWER, TtftParts

TIMINGS_HEADER = "x-kvrelay-timings"  # asks a kvrelay gateway for its timings; other servers ignore it
_FRESH_S = 2.0  # servers close idle connections, uvicorn after 5 s; a younger connection is safe to reuse
_MAX_ERROR_BYTES = 100_000
_MAX_ERROR_TEXT = 200  # characters; see RequestRecord.error_text

ROUTES = {"completions": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        if delta.content or delta.reasoning_content or delta.reasoning:
            return True
        return delta.content is not None and self.finish_reason is None and delta.role is None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    kvrelay: TtftParts | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


@dataclass(slots=True)
class Answer:
    """The result of one request. Times are on the client's ``clock``."""

    sent_s: float
    finished_s: float = 0.0
    ended_s: float = 0.0  # when the client stopped waiting; after [DONE] that is the end of the body
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None  # as the server counted them
    output_tokens: int | None = None
    finish_reason: str | None = None
    parts: TtftParts | None = None
    error: str | None = None
    error_text: str | None = None


class StreamingClient:
    """Sends bodies to one route of one server. Belongs to the running event loop; call ``close`` at the end."""

    def __init__(
        self,
        url: str,
        api: str,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``clock`` gives the seconds in which answers are timed. Raises SettingsError on an invalid URL."""
        self._address = ServerAddress(url)
        fixed = {"host": self._address.authority, "user-agent": "kvrelay-bench", "content-type": "application/json"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **headers}.items())
        self._head = f"POST {self._address.base_path}{ROUTES[api]} HTTP/1.1\r\n{lines}".encode()
        self._tls = ssl.create_default_context() if self._address.is_tls else None
        self._idle: list[Connection] = []
        self._timeout_s = timeout_s
        self._clock = clock

    async def close(self) -> None:
        """Close the idle connections. ``ask`` closes those in use."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # transports close at the loop's next turn

    async def ask(self, body: bytes, *, exact_tokens: int | None = None) -> Answer:
        """Send ``body`` and read the whole answer. Server failures never raise: the answer records them.

        ``exact_tokens``: a complete answer of another length fails as a "short answer". Cancelling closes the connection.
        """
        exchange = _Exchange(self._clock, asyncio.get_running_loop().create_future())
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._fresh() or await self._connect()
                connection.send(b"%scontent-length: %d\r\n\r\n%s" % (self._head, len(body), body), exchange)
                await exchange.done
        except TimeoutError:
            exchange.fail("timeout", f"no complete answer after {self._timeout_s:g} s")
        except OSError as error:
            exchange.fail("connection", str(error) or type(error).__name__)
        finally:
            if connection is not None:
                connection.abandon(exchange)
        answer = exchange.answer
        if answer.error is None and exact_tokens is not None:
            _check_length(answer, exact_tokens)
        return answer

    def _fresh(self) -> Connection | None:
        oldest_s = time.monotonic() - _FRESH_S
        while self._idle:
            connection = self._idle.pop()  # the most recently used
            if connection.is_open and connection.idle_since_s >= oldest_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._idle.append), self._address.host, self._address.port, ssl=self._tls
        )
        return connection


class EventSplitter:
    """Splits a byte stream into server-sent events. Lines may end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The ``data`` of every event that ends in ``data``."""
        if not self._rest and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            lines = data[6:-2]
            if b"\n" not in lines:  # fast path for nearly all data: one event of one line
                yield lines
                return
        data = self._rest + data
        if b"\r" in data:
            # A CR at the very end may be the first half of a line end.
            end = len(data) - data.endswith(b"\r")
            data = data[:end].replace(b"\r\n", b"\n") + data[end:]
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            found = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if found:  # comments, such as pings, carry no data
                yield b"\n".join(found)


class _Exchange:
    """Receives one answer."""

    def __init__(self, clock: Callable[[], float], done: asyncio.Future[None]) -> None:
        self.answer = Answer(sent_s=clock())
        self.done = done
        self._clock = clock
        self._status = 0
        self._splitter = EventSplitter()
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._error_body = b""
        self._is_done = False  # [DONE] came
        self._is_over = False  # nothing more is expected; ``done`` itself may have been cancelled by a timeout

    def fail(self, kind: str, text: str) -> None:
        """Record a failure, if it is the first one, and end the exchange."""
        if self.answer.error is None and not self._is_over:
            self.answer.error, self.answer.error_text = kind, text[:_MAX_ERROR_TEXT]
        self._end()

    # -- StreamHandler ---------------------------------------------------------------------------------------------

    def on_status(self, status: int) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if self._status != 200:
            if len(self._error_body) < _MAX_ERROR_BYTES:
                self._error_body += data
            return
        now_s = self._clock()
        try:
            for event in self._splitter.feed(data):
                self._on_event(event, now_s)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail("broken stream", f"a chunk is not what it should be: {error}")

    def on_end(self) -> None:
        if self._status != 200:
            self.fail(f"http {self._status}", _message(self._error_body))
        elif self.answer.error is None and not self._is_done and self.answer.finish_reason is None:
            self.fail("broken stream", "the answer ended without [DONE] and without a finish reason")
        else:
            self._end()

    def on_lost(self, reason: str) -> None:
        # What came before counts: an error status is a refusal even if its text was cut off.
        if self._is_done:
            self._end()
        elif self._status == 200:
            self.fail("broken stream", reason)
        elif self._status > 200:
            self.fail(f"http {self._status}", _message(self._error_body) or reason)
        else:
            self.fail("connection", reason)

    # --------------------------------------------------------------------------------------------------------------

    def _on_event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            self._is_done = True
            self.answer.finished_s = now_s
            return
        chunk = self._decoder.decode(event)
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.has_content:
                self.answer.chunk_s.append(now_s)
            if choice.finish_reason is not None:
                self.answer.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            self.answer.prompt_tokens = chunk.usage.prompt_tokens
            self.answer.output_tokens = chunk.usage.completion_tokens
        if chunk.kvrelay is not None:
            self.answer.parts = chunk.kvrelay
        if chunk.error is not None or chunk.object == "error":
            self.fail("broken stream", _message(event))

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.answer.ended_s = self._clock()
            self.answer.finished_s = self.answer.finished_s or self.answer.ended_s
            if not self.done.done():
                self.done.set_result(None)


def _check_length(answer: Answer, exact_tokens: int) -> None:
    has_usage = answer.output_tokens is not None
    num_tokens = len(answer.chunk_s) if answer.output_tokens is None else answer.output_tokens
    # Without usage only chunks can be counted, and one may bring several tokens. So too few chunks are a whole answer,
    # unless the server names another finish reason than the length.
    is_short = num_tokens != exact_tokens
    if not has_usage and num_tokens:
        is_short = num_tokens < exact_tokens and answer.finish_reason not in (None, "length")
    if is_short:
        answer.error = SHORT_ANSWER
        answer.error_text = (
            f"{num_tokens} {'tokens' if has_usage else 'chunks'} instead of {exact_tokens} "
            f"(finish reason: {answer.finish_reason}); a server that does not know ignore_eos needs --no-ignore-eos"
        )[:_MAX_ERROR_TEXT]


def _message(body: bytes) -> str:
    """The message of an error body in the formats of OpenAI, vLLM and FastAPI, or else the body itself."""
    text = body.decode(errors="replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        return text
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), text)
    return value if isinstance(value, str) else text
