"""Garbage from strangers and broken peers at a control port: it is counted and refused, and links go on."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, Codec
from kvrelay.wire.messages import Cancel, Cancelled, FailureCode, Hello, HelloRefused, Ping, Role, Welcome

from ..links import WAIT_S, Net, Worker, next_of


async def test_garbage_is_counted_and_the_link_goes_on(net: Net) -> None:
    worker, _server, _, client = await net.linked()
    with net.raw(net.address) as socket:
        await socket.send(b"\xff\xfe")
        await socket.send_multipart([Codec().encode(Ping()), b"more"])
        await socket.send(b"\x82\xa4type\xa4Ping\xa3zzz" + b"\x91" * 200_000 + b"\xc0")
        await socket.say(Ping())  # before Hello
        await socket.say(Hello(role=Role.GATEWAY, peer_id=""))
        await socket.say(Hello(role=Role.GATEWAY, peer_id="raw"))
        answers = []
        while not answers or not isinstance(answers[-1], Welcome):
            answers.append(await socket.hear())
    assert [type(answer) for answer in answers] == [HelloRefused, HelloRefused, Welcome]
    assert net.counted("refused_messages", cause="malformed") == 3
    assert net.counted("refused_messages", cause="before_hello") == 1
    assert client.send(Cancel(request_id="r", attempt=1))
    assert (await next_of(worker.heard))[2] == Cancel(request_id="r", attempt=1)


async def test_garbage_from_a_server_does_not_end_the_link(net: Net) -> None:
    _, server, initiator, _ = await net.linked()
    for garbage in (b"\xff", b"\x82\xa4type\xa4Ping\xa3zzz" + b"\x91" * 200_000 + b"\xc0"):
        assert server._socket.send([server._routes[Role.PREFILL, "p"], garbage])
    assert server.send(Role.PREFILL, "p", Cancelled(request_id="r", attempt=1))
    assert await next_of(initiator.events) == Cancelled(request_id="r", attempt=1)
    assert net.counted("refused_messages", cause="malformed") == 2


async def test_an_oversize_frame_costs_its_sender_the_connection_only(net: Net) -> None:
    worker, _server, _, client = await net.linked()
    with net.raw(net.address) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await socket.send(bytes(MAX_CONTROL_FRAME_NBYTES + 1))
        await asyncio.wait_for(monitor.recv_multipart(), WAIT_S)
        socket.disable_monitor()
        monitor.close(linger=0)
    assert client.send(Cancel(request_id="r", attempt=1))
    assert (await next_of(worker.heard))[2] == Cancel(request_id="r", attempt=1)


@pytest.mark.parametrize("peer_id", ["x\n12:00:00 INFO all is well", "x" * 256, ""])
async def test_a_name_that_could_not_be_logged_is_refused(net: Net, peer_id: str) -> None:
    """A Hello with a line break, too many characters or none in its peer id is refused. Its routing id may be any bytes."""
    server = net.server(Worker())
    with net.raw(await server.start(), b"\xff\xfe") as socket:
        await socket.say(Hello(role=Role.GATEWAY, peer_id=peer_id))
        assert isinstance(await socket.hear(), HelloRefused)
    assert not server.send(Role.GATEWAY, peer_id, Ping())


async def test_refusals_are_short_and_told_once(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """A peer can choose the text that a refusal quotes. The answer and the log line stay short, and there is one log line."""
    worker = Worker()
    worker.refusal = HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail="differs: " + "x" * 100_000)
    with net.raw(await net.server(worker).start()) as socket:
        for _ in range(3):
            await socket.say(Hello(role=Role.PREFILL, peer_id="raw"))
            refused = await socket.hear()
            assert isinstance(refused, HelloRefused)
            assert len(refused.detail) < 1100
    told = [record.getMessage() for record in caplog.records if "refused a prefill" in record.getMessage()]
    assert len(told) == 1
    assert len(told[0]) < 1100
