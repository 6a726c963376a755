"""Connections that end while an executor uses them, against a server that ends them at a known moment."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from kvrelay.executor import LLM, GatewayUnreachableError, Request, RequestOutput, SamplingParams
from kvrelay.executor.connections import KEPT_S, Connections, RemoteSettings
from kvrelay.gateway.settings import HttpLimits

CHOICE = {"index": 0, "text": "yes", "token_ids": [7], "prompt_token_ids": [1], "finish_reason": "length"}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, as a close with unread bytes does


@dataclass
class Breaking:
    """A gateway of one model that ends the connections of its first ``breaks`` completions instead of answering."""

    breaks: int
    heads: list[str] = field(default_factory=list)  # of the completions
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    num_connections: int = 0
    num_open: int = 0
    num_asked: int = 0  # requests that wait for an answer

    def __post_init__(self) -> None:
        self.answers.set()

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        while line := await reader.readline():
            head = line + await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            self.num_asked += 1
            await self.answers.wait()
            self.num_asked -= 1
            answer: dict[str, object] = {"data": [{"id": "m", "max_model_len": 100}]}
            if line.startswith(b"POST /v1/completions"):
                self.heads.append(head.decode())
                if self.breaks:
                    self.breaks -= 1
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    break
                answer = {"choices": [CHOICE]}
            data = json.dumps(answer).encode()
            if b'"stream":true' in body:
                data = b"data: %s\n\ndata: [DONE]\n\n" % data
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.num_open -= 1

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its URL; at the end, all connections have been ended by their clients."""
        server = await asyncio.start_server(self.on_connection, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, asyncio.timeout(20):
            yield f"http://{host}:{port}"
            while self.num_open:
                await asyncio.sleep(0.01)  # polls for a state, bounded by the timeout above


async def ask(gateway: Breaking, use: Callable[[LLM], RequestOutput]) -> RequestOutput:
    """What ``use`` returns of an executor that asks ``gateway``."""

    def in_thread(url: str) -> RequestOutput:
        with LLM(address=url) as llm:
            return use(llm)

    async with gateway.listening() as url:
        return await asyncio.to_thread(in_thread, url)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_ends_before_the_answer(stream: bool) -> None:
    """As one that a gateway closes, idle until then, just as a request comes."""
    gateway = Breaking(1)
    request = Request([1], SamplingParams(max_tokens=1), request_id="mine", timeout_s=50)
    output = await ask(gateway, lambda llm: llm.submit(request, stream=stream).result(20))
    assert output.outputs[0].text == "yes"
    first, second = gateway.heads
    assert "x-request-id: mine" in first
    assert "x-request-id: mine" in second
    left_s = [float(head.partition("x-request-timeout: ")[2].split()[0]) for head in gateway.heads]
    assert 50 >= left_s[0] > left_s[1] > 30, "the second try has what is left of the time"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_ends_again(stream: bool) -> None:
    gateway = Breaking(2)
    with pytest.raises(GatewayUnreachableError, match="ReadError"):
        await ask(gateway, lambda llm: llm.submit([1], SamplingParams(max_tokens=1), stream=stream).result(20))
    assert len(gateway.heads) == 2


async def test_no_more_connections_than_are_allowed_and_each_used_again() -> None:
    gateway = Breaking(0)
    async with gateway.listening() as url:
        connections = Connections(url, {}, RemoteSettings(max_connections=40))

        async def use() -> None:
            async with connections.one() as client:
                assert (await client.get("/v1/models")).is_success

        for num_users, num_at_a_time in ((3, 3), (100, 40)):
            gateway.answers.clear()
            users = [asyncio.create_task(use()) for _ in range(num_users)]
            while gateway.num_asked < num_at_a_time:
                await asyncio.sleep(0.01)  # polls for a state, bounded by listening()
            assert (gateway.num_asked, gateway.num_connections) == (num_at_a_time, num_at_a_time)
            gateway.answers.set()
            await asyncio.gather(*users)
            assert (gateway.num_asked, gateway.num_connections) == (0, num_at_a_time)
        await connections.aclose()


def test_executors_end_idle_connections_before_gateways_do() -> None:
    assert HttpLimits().keep_alive_s > 2 * KEPT_S
