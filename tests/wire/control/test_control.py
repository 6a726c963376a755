"""Control links on real sockets: welcome, refusals, silence, restarts. Every wait is for an event."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvrelay.common.images import ImageSpan, PromptImage
from kvrelay.common.sampling import SamplingParams
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, MAX_FRAME_NBYTES_WITH_IMAGES, Codec
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.errors import MalformedMessageError, WireError
from kvrelay.wire.messages import (
    Bye,
    Cancel,
    Cancelled,
    FailureCode,
    Hello,
    HelloRefused,
    Ping,
    Role,
    Status,
    Submit,
    Welcome,
)
from kvrelay.wire.settings import LinkSettings

from ...ipv6 import needs_ipv6
from ..lease_bench import Clock
from ..links import FAST, OWN_ADDRESS, SOON_LOST, WAIT_S, Initiator, Net, Worker, next_of


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:0",
        "ipc://{tmp_path}/control",
        pytest.param("tcp://[::1]:0", marks=needs_ipv6),
        pytest.param("tcp://::1:0", marks=needs_ipv6),  # as a pod writes it, which knows its bare address
    ],
)
async def test_messages_go_both_ways(net: Net, address: str, tmp_path: Any) -> None:
    address = address.format(tmp_path=tmp_path)
    worker, server, initiator, client = await net.linked(address=address)
    assert client.is_up
    assert server.is_alive
    assert client.send(Cancel(request_id="r", attempt=1))
    assert await next_of(worker.heard) == ("p", Role.PREFILL, Cancel(request_id="r", attempt=1))
    assert server.send(Role.PREFILL, "p", Cancelled(request_id="r", attempt=1))
    assert await next_of(initiator.events) == Cancelled(request_id="r", attempt=1)
    assert isinstance(await next_of(initiator.statuses), Status)
    await net.stop(client, server)
    assert list(tmp_path.iterdir()) == [], "a socket file stays behind"


async def test_a_large_message_passes(net: Net) -> None:
    worker, _, _, client = await net.linked()
    submit = Submit(
        request_id="r",
        attempt=1,
        token_ids=list(range(10**6)),
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
    )
    assert client.send(submit)
    assert (await next_of(worker.heard))[2] == submit


async def test_a_taken_port_is_a_clear_error(net: Net) -> None:
    _, _server, _, _ = await net.linked()
    other = ControlServer(net.address, Worker(), FAST, metrics=net.metrics, network=net.network)
    with pytest.raises(WireError, match="cannot listen on"):
        await other.start()


async def test_sending_to_nobody_says_so(net: Net) -> None:
    _, server, _, client = await net.linked()
    assert not server.send(Role.PREFILL, "nobody", Ping())
    late = ControlClient(
        net.address, Hello(role=Role.PREFILL, peer_id="q"), Initiator(), FAST, metrics=net.metrics, network=net.network
    )
    assert not late.send(Ping())  # before its start
    await late.stop()
    await net.stop(client, server)
    assert not client.is_up
    assert not client.send(Ping())
    assert not server.send(Role.PREFILL, "p", Ping())


async def test_an_oversize_message_is_the_senders_error(net: Net) -> None:
    _, server, _, _ = await net.linked()
    with pytest.raises(MalformedMessageError):
        server.send(Role.PREFILL, "p", HelloRefused(code=FailureCode.INVALID, detail="x" * MAX_CONTROL_FRAME_NBYTES))


async def test_a_large_image_arrives_as_one_message_where_images_are_read(net: Net) -> None:
    worker, _, _, client = await net.linked(max_frame_nbytes=MAX_FRAME_NBYTES_WITH_IMAGES)
    submit = Submit(
        request_id="r",
        attempt=1,
        token_ids=[1] * 9,
        num_prompt_tokens=9,
        sampling=SamplingParams(max_tokens=1),
        images=[PromptImage(ImageSpan(0, 4, bytes(16)), bytes(20 * 10**6))],
    )
    assert client.send(submit)
    assert (await next_of(worker.heard))[2] == submit


async def test_no_common_version_is_refused_with_both_named(net: Net) -> None:
    initiator = Initiator()
    net.client(await net.server(Worker()).start(), initiator, protocol_min=8, protocol_max=9)
    refused = await next_of(initiator.events)
    assert isinstance(refused, HelloRefused)
    assert "yours 8 to 9, mine 1 to 1" in refused.detail
    assert net.counted("refused_hellos", code="invalid") >= 1


async def test_a_newer_peer_that_still_speaks_ours_is_welcome(net: Net) -> None:
    initiator = Initiator()
    net.client(await net.server(Worker()).start(), initiator, protocol_min=1, protocol_max=9)
    assert (await next_of(initiator.events)).protocol == 1


async def test_a_worker_that_refuses_is_not_asked_all_the_time_by_those_who_hurry(net: Net) -> None:
    worker, initiator = Worker(), Initiator()
    worker.refusal = HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail="mine / yours")
    settings = LinkSettings(ping_interval_s=0.4, reconnect_max_s=0.4)
    client = net.client(await net.server(worker).start(), initiator, settings=settings)
    loop = asyncio.get_running_loop()
    await next_of(initiator.events)
    begun_s = loop.time()
    for _ in range(3):
        client.hurry()
        await next_of(initiator.events)
    assert loop.time() - begun_s > 3 * 0.09  # a pause has 0.1 s at least


async def test_a_refused_client_comes_in_when_the_worker_changes_its_mind(net: Net) -> None:
    worker, initiator = Worker(), Initiator()
    worker.refusal = HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail="mine / yours")
    client = net.client(await net.server(worker).start(), initiator)
    assert await next_of(initiator.events) == worker.refusal
    assert not client.is_up
    worker.refusal = None
    while not isinstance(event := await next_of(initiator.events), Welcome):
        assert isinstance(event, HelloRefused)  # never "lost": it was never up


async def test_a_client_waits_for_a_server_that_comes_later(net: Net, tmp_path: Any) -> None:
    initiator, address = Initiator(), f"ipc://{tmp_path}/late"
    net.client(address, initiator)
    await net.server(Worker(), address).start()
    assert isinstance(await next_of(initiator.events), Welcome)


async def test_a_restarted_server_is_lost_and_then_welcome_with_its_new_epoch(net: Net) -> None:
    _, server, initiator, client = await net.linked(address=OWN_ADDRESS)
    await net.stop(server)
    assert isinstance(await next_of(initiator.events), str)
    assert not client.send(Ping())
    await net.server(Worker(epoch=2), net.address).start()
    welcome = await next_of(initiator.events)
    assert (welcome.epoch, client.is_up) == (2, True)
    assert net.counted("lost_peers") >= 1


async def test_a_restarted_client_voids_what_it_asked_for_before(net: Net) -> None:
    worker, server, _, client = await net.linked()
    # Dies without Bye: the same peer id comes from a new connection.
    client._task.cancel()
    client._is_up = False
    again = Initiator()
    net.client(net.address, again)
    assert await next_of(worker.lost) == "p"
    assert isinstance(await next_of(again.events), Welcome)
    assert server.send(Role.PREFILL, "p", Cancelled(request_id="r", attempt=1))
    assert await next_of(again.events) == Cancelled(request_id="r", attempt=1)


def hello(role: Role, name: str = "raw") -> Hello:
    return Hello(role=role, peer_id=name)


CANCELLED = Cancelled(request_id="r", attempt=1)


async def test_a_name_goes_to_whoever_said_hello_last(net: Net) -> None:
    """Two connections use one peer id. The later one gets its messages, so a half-open connection keeps nobody out."""
    worker = Worker()
    server = net.server(worker)
    address = await server.start()
    with net.raw(address, b"half open") as half_open, net.raw(address, b"again") as again:
        for peer in (half_open, again):
            assert isinstance(await peer.ask(hello(Role.GATEWAY)), Welcome)
        assert await next_of(worker.lost) == "raw"
        assert server.send(Role.GATEWAY, "raw", CANCELLED)
        assert await again.hear() == CANCELLED
        assert isinstance(await half_open.ask(Ping()), HelloRefused)


async def test_nobody_takes_a_routing_id_that_is_in_use(net: Net) -> None:
    server = net.server(Worker())
    address = await server.start()
    with net.raw(address, b"the same") as first, net.raw(address, b"another") as other:
        assert isinstance(await first.ask(hello(Role.PREFILL)), Welcome)
        with net.raw(address, b"the same") as thief:
            await thief.say(hello(Role.PREFILL))
            assert isinstance(await other.ask(hello(Role.GATEWAY)), Welcome)  # gives the thief's Hello time to arrive
            assert server.send(Role.PREFILL, "raw", CANCELLED)
            assert await first.hear() == CANCELLED


async def test_clients_choose_another_routing_id_for_every_connection(net: Net) -> None:
    socket, address = net.raw_server()
    with socket:
        for _ in range(2):
            net.client(address, Initiator(), peer_id="p")
        routing_ids = {(await asyncio.wait_for(socket.recv_multipart(), WAIT_S))[0] for _ in range(2)}
        assert len(routing_ids) == 2
        assert all(len(routing_id) > 16 and routing_id != b"p" for routing_id in routing_ids)
        await net.stop(*list(net.to_stop))


async def test_a_name_belongs_to_its_role(net: Net) -> None:
    """A gateway and a prefill worker have the same peer id. Each gets its own messages, and neither replaces the other."""
    worker = Worker()
    server = net.server(worker)
    address = await server.start()
    with net.raw(address, b"1") as gateway, net.raw(address, b"2") as prefill:
        peers = ((Role.GATEWAY, gateway), (Role.PREFILL, prefill))
        for role, socket in peers:
            assert isinstance(await socket.ask(hello(role, "gw")), Welcome)
        for role, socket in peers:
            message = Cancelled(request_id=role.value, attempt=1)
            assert server.send(role, "gw", message)
            assert await socket.hear() == message
        assert worker.lost.empty()


async def test_bye_is_told_at_once(net: Net) -> None:
    worker, _, _, client = await net.linked()
    await net.stop(client)
    assert await next_of(worker.lost) == "p"


async def test_a_silent_client_is_lost_and_a_prefill_worker_gets_more_time(net: Net) -> None:
    """A gateway and a prefill worker fall silent at the same time. The gateway is lost first."""
    worker, clock = Worker(), Clock()
    net.network = replace(net.network, clock=clock)
    address = await net.server(worker).start()
    with net.raw(address) as prefill, net.raw(address, routing_id=b"gateway") as gateway:
        assert isinstance(await prefill.ask(hello(Role.PREFILL)), Welcome)
        assert isinstance(await gateway.ask(hello(Role.GATEWAY, "gateway")), Welcome)
        clock.now_s += FAST.peer_timeout_s + 1
        assert await next_of(worker.lost) == "gateway"
        assert worker.lost.empty()
        clock.now_s += FAST.between_workers().peer_timeout_s - FAST.peer_timeout_s
        assert await next_of(worker.lost) == "raw"
    assert net.counted("lost_peers") == 2


async def test_a_silent_server_is_lost(net: Net) -> None:
    """The server answers Hello and nothing more, although its connection stays open. The client notices the silence."""
    initiator = Initiator()
    socket, address = net.raw_server()
    with socket:
        client = net.client(address, initiator, settings=SOON_LOST)
        for _ in range(2):  # the second time with a new socket
            while True:
                peer, frame = await asyncio.wait_for(socket.recv_multipart(), WAIT_S)
                if isinstance(Codec().decode(frame), Hello):
                    break
            await socket.send_multipart([peer, Codec().encode(Worker().welcome(hello(Role.PREFILL)))])
            assert isinstance(await next_of(initiator.events), Welcome)
            assert "silent" in await next_of(initiator.events)
        await net.stop(client)


async def test_a_client_that_waits_for_welcome_does_not_spin(net: Net) -> None:
    """The server never answers. The client wakes up only a few times until its Hello times out."""
    settings = LinkSettings(ping_interval_s=0.01, peer_timeout_s=3600, hello_timeout_s=0.5)
    socket, address = net.raw_server()
    with socket:
        num_waits = 0
        wait = asyncio.Event.wait

        def counting(self: asyncio.Event) -> Any:
            nonlocal num_waits
            num_waits += 1
            return wait(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Event, "wait", counting)
            client = net.client(address, Initiator(), settings=settings)
            for _ in range(2):  # the second Hello comes after the first one's timeout
                await asyncio.wait_for(socket.recv_multipart(), WAIT_S)
            await net.stop(client)
        assert 0 < num_waits < 10


async def test_a_client_tries_again_when_it_cannot_even_begin(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client twice fails to make a socket because no descriptor is left. It reports that, and then connects."""
    address = await net.server(Worker()).start()
    make, num_failed = net.context.socket, 0

    def failing(kind: int) -> zmq.Socket[bytes]:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise zmq.ZMQError(errno.EMFILE)
        return make(kind)

    monkeypatch.setattr(net.context, "socket", failing)
    initiator = Initiator()
    net.client(address, initiator)
    for _ in range(2):
        assert "cannot connect to tcp://127.0.0.1" in (await next_of(initiator.events)).detail
    assert isinstance(await next_of(initiator.events), Welcome)


async def test_an_address_that_is_none_is_told(net: Net) -> None:
    initiator = Initiator()
    net.client("nonsense", initiator)
    assert "cannot connect to nonsense" in (await next_of(initiator.events)).detail


async def test_a_handler_that_fails_does_not_kill_the_server(net: Net) -> None:
    worker, server, _, client = await net.linked()
    worker.error = RuntimeError("boom")
    for _ in range(2):
        assert client.send(Cancel(request_id="r", attempt=1))
        await next_of(worker.heard)
    await net.stop(client)
    await next_of(worker.lost)
    assert server.is_alive


async def test_a_handler_that_fails_does_not_kill_the_client(net: Net) -> None:
    _, server, initiator, client = await net.linked(address=OWN_ADDRESS)
    initiator.error = RuntimeError("boom")  # on_welcome fails, too, and then the link is not up
    assert server.send(Role.PREFILL, "p", Cancelled(request_id="r", attempt=1))
    await next_of(initiator.events)
    await net.stop(server)
    assert isinstance(await next_of(initiator.events), str)  # on_lost fails, too
    await net.server(Worker(epoch=2), net.address).start()
    assert (await next_of(initiator.events)).epoch == 2
    assert isinstance(await next_of(initiator.events), HelloRefused)
    assert not client.is_up
    initiator.error = None
    while not client.is_up:
        await next_of(initiator.events)


def test_it_works_on_uvloop(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def scenario() -> None:
        net = Net(context)
        worker, _, _, client = await net.linked()
        assert client.send(Cancel(request_id="r", attempt=1))
        await next_of(worker.heard)
        await net.stop(*reversed(net.to_stop))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_a_client_that_the_server_forgot_begins_anew_at_once(net: Net) -> None:
    _worker, _server, initiator, client = await net.linked()
    assert client.send(Bye())  # the server forgets the client, as after a silence that the client has not noticed
    assert client.send(Cancel(request_id="r", attempt=1))
    assert await next_of(initiator.events) == "not known here: say Hello"
    assert isinstance(await next_of(initiator.events), Welcome)
    assert client.is_up
