"""The edge that every request passes: limits of bodies, and the end of a request whose client leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.gateway.http.edge import Edge
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.http.sse import EventStream
from kvrelay.gateway.metrics import GatewayMetrics

from ..http_port import POST, Port, Recorder, error_of, serving

WHOLE: Message = {"type": "http.request", "body": b"x", "more_body": False}
HALF: Message = {"type": "http.request", "body": b"x", "more_body": True}
LEFT: Message = {"type": "http.disconnect"}


class Work:
    """An application that never answers."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled = True


class Client:
    """A client that sends ``messages``, and takes the whole answer."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    def leave(self) -> None:
        self.messages.append(LEFT)
        self.left.set()

    async def ask(self, edge: Edge) -> None:
        await edge({"type": "http", "method": "POST", "path": "/work", "headers": []}, self.receive, self.send)

    async def receive(self) -> Message:
        if not self.messages:
            await self.left.wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def counted(metrics: GatewayMetrics) -> Callable[[str], float | None]:
    """A function that counts requests by outcome."""
    labels = {"route": "/work"}
    return lambda name: metrics.registry.get_sample_value(
        "kvrelay_requests_total", {**labels, "model": "", "outcome": name}
    )


@pytest.mark.parametrize("messages", [(HALF, LEFT), (HALF, WHOLE, LEFT)])
async def test_a_client_that_leaves_ends_its_request(messages: tuple[Message, ...]) -> None:
    """A client leaves after its whole body, and the application is cancelled. After half a body it never begins."""
    metrics, work, client = GatewayMetrics(CollectorRegistry()), Work(), Client(*messages)
    await client.ask(Edge(work, {"/work"}, 100, 60.0, metrics))
    assert work.has_begun.is_set() is work.was_cancelled is (WHOLE in messages)
    assert client.sent == []
    assert counted(metrics)("client_left") == 1
    assert metrics.registry.get_sample_value("kvrelay_client_disconnects_total") == 1
    async with asyncio.timeout(20):  # would raise if the task were still being cancelled
        await asyncio.sleep(0)


async def test_a_gateway_that_cannot_wait_tells_clients_to_ask_again() -> None:
    metrics, work, client = GatewayMetrics(CollectorRegistry()), Work(), Client(WHOLE)
    request = asyncio.create_task(client.ask(Edge(work, {"/work"}, 100, 60.0, metrics)))
    await work.has_begun.wait()
    request.cancel()
    await request
    assert client.sent[0]["status"] == 503
    assert b"shutting_down" in client.sent[1]["body"]
    assert counted(metrics)("503") == 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_stream_that_breaks_off_tells_why(leaves: bool) -> None:
    """Its status was 200 all the same."""
    metrics, begun = GatewayMetrics(CollectorRegistry()), asyncio.Event()
    requests: list[ApiRequest] = []

    async def produce(stream: EventStream) -> bytes:
        stream.write(b"event")
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        requests.append(scope["state"]["api_request"])
        await requests[0].body()
        await EventStream(produce, lambda error: error.code.encode())(scope, receive, send)

    client = Client(WHOLE)
    asked = asyncio.create_task(client.ask(Edge(app, {"/work"}, 100, 60.0, metrics)))
    await begun.wait()
    if leaves:
        client.leave()
    else:
        asked.cancel()  # as at a shutdown
    await asked
    said = b"".join(message.get("body", b"") for message in client.sent)
    error = requests[0].error
    if leaves:
        assert (said, error, counted(metrics)("client_left")) == (b"event", None, 1)
    else:
        assert said == b"eventshutting_down"
        assert error is not None
        assert counted(metrics)("failed_mid_stream") == 1


async def test_a_body_is_forgotten_with_its_request() -> None:
    """The request's objects are freed at its end, with the garbage collector off."""
    requests: list[weakref.ref[ApiRequest]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = scope["state"]["api_request"]
        assert await request.body() == b"x"
        requests.append(weakref.ref(request))
        await Response()(scope, receive, send)

    gc.disable()
    try:
        await Client(WHOLE).ask(Edge(app, (), 100, 60.0, GatewayMetrics(CollectorRegistry())))
        assert [reference() for reference in requests] == [None]
    finally:
        gc.enable()


@asynccontextmanager
async def edge_port(app: Recorder, max_body_bytes: int, timeout_s: float) -> AsyncIterator[tuple[Port, GatewayMetrics]]:
    metrics = GatewayMetrics(CollectorRegistry())
    async with serving(Edge(app, (), max_body_bytes, timeout_s, metrics), client_timeout_s=timeout_s) as port:
        yield port, metrics


@pytest.mark.parametrize(
    "rest", [b"content-length: 90\r\n\r\n" + b"x" * 10, b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"]
)
async def test_a_body_that_does_not_come_is_408(rest: bytes) -> None:
    """The rest of a body does not come in time. The 408 ends the connection, so that late bytes cannot become a request."""
    app = Recorder()
    async with edge_port(app, 10_000, 0.2) as (port, metrics):
        error = error_of(await port.talk(POST + rest), 408)
        assert error["code"] == "request_too_slow"
        assert "0.2 s, which is the limit" in error["message"]
    name = "kvrelay_refused_connections_total"
    assert metrics.registry.get_sample_value(name, {"reason": "body_timeout"}) == 1
    assert app.bodies == []


@pytest.mark.parametrize("length", [10, 11])
async def test_a_body_in_chunks_that_has_come_at_once_is_bounded(length: int) -> None:
    app = Recorder()
    async with edge_port(app, 10, 60.0) as (port, _):
        body = b"%x\r\n" % length + b"x" * length + b"\r\n0\r\n\r\n"
        said = await port.talk(POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        if length == 10:
            assert said.startswith(b"HTTP/1.1 200")
        else:
            assert "more than 10 bytes, which is the limit" in error_of(said, 413)["message"]
    assert len(app.bodies) == (length == 10)
