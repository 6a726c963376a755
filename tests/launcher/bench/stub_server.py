"""A small OpenAI-compatible server on real sockets with scripted answers, in the test's loop or in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# The most turns of the loop from a client's connection to its task. asyncio leaks a connection if its server closes in
# between.
_TURNS_TO_ACCEPT = 8

Pieces = list[bytes]  # of a body; each is one write and one HTTP chunk


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Answer:
    pieces: Pieces
    status: int = 200
    is_cut: bool = False  # the connection closes in the middle of the body
    wait: Callable[[], Awaitable[None]] | None = None  # awaited before the last piece
    closes: bool = False  # closes the connection after a complete answer


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion(texts: list[str], *, usage: tuple[int, int] | None = None, **extra: object) -> Pieces:
    pieces = [event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}) for text in texts]
    pieces.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    if usage is not None:
        body = {"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}, **extra}
        pieces.append(event(body))
    return [*pieces, event(b"[DONE]")]


def as_asked(request: Request) -> Answer:
    """Answer with as many tokens as requested, and report the prompt's length."""
    num = request.body["max_tokens"]
    prompt = request.body.get("prompt") or request.body["messages"][0]["content"]
    if isinstance(prompt, str):
        prompt = prompt.split()
    if "messages" in request.body:
        first = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        deltas = [event({"choices": [{"index": 0, "delta": {"content": "a"}}]}) for _ in range(num)]
        usage = event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": num}})
        return Answer([first, *deltas, usage, event(b"[DONE]")])
    return Answer(completion([" a"] * num, usage=(len(prompt), num)))


@dataclass
class StubServer:
    answer: Callable[[Request], Answer] = as_asked
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    max_model_len: int = 4096
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            models = json.dumps({"data": [{"id": "stub", "max_model_len": self.max_model_len}]}).encode()
            head_out = f"HTTP/1.1 200 OK\r\ncontent-length: {len(models)}\r\nconnection: close\r\n\r\n"
            writer.write(head_out.encode() + models)
            await writer.drain()
            return False
        request = Request(path, headers, json.loads(body))
        self.requests.append(request)
        answer = self.answer(request)
        writer.write(f"HTTP/1.1 {answer.status} Status\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for index, piece in enumerate(answer.pieces):
            if answer.wait is not None and index == len(answer.pieces) - 1:
                await writer.drain()
                await answer.wait()
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if not answer.is_cut:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return not (answer.is_cut or answer.closes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubServer]:
        tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self.serve(reader, writer))
            tasks[task] = writer
            task.add_done_callback(tasks.pop)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            for _ in range(_TURNS_TO_ACCEPT):
                await asyncio.sleep(0)
            server.close()
            left = dict(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            for writer in left.values():
                writer.transport.abort()  # a task that was cancelled before its start has closed nothing
                with suppress(ConnectionError):
                    await writer.wait_closed()
            await server.wait_closed()

    @contextmanager
    def in_thread(self) -> Iterator[StubServer]:
        """Run the server in a thread, for programs with their own event loop."""
        started = threading.Event()
        handles: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

        async def main() -> None:
            async with self.running():
                stop = asyncio.Event()
                handles.append((asyncio.get_running_loop(), stop))
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        assert started.wait(20)
        try:
            yield self
        finally:
            loop, stop = handles[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(20)
            assert not thread.is_alive()
