"""Links to decode workers: how they come up, break and are made anew, and how lost workers are forgotten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.engine.fake.engine import fake_card
from kvrelay.prefill_worker import links
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.messages import (
    FailureCode,
    Grant,
    Hello,
    HelloRefused,
    Message,
    Ping,
    Role,
    Status,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.transfers.transfer import DecodeLink
from kvrelay.worker.setup import Setup
from tests.reliability.fleet import Cable
from tests.wire.links import IDLE


@pytest.mark.parametrize(
    "message",
    [
        Grant(request_id="r", attempt=1, lease_id=-1, epoch=1, num_cached_blocks=0, ttl_s=1.0),
        Grant(request_id="r", attempt=1, lease_id=1, epoch=-7, num_cached_blocks=0, ttl_s=1.0),
        Grant(request_id="r", attempt=1, lease_id=1, epoch=1, num_cached_blocks=-1, ttl_s=1.0),
        Ping(),
    ],
)
async def test_a_worker_whose_answers_make_no_sense_is_not_talked_to(message: Message) -> None:
    """A grant with negative numbers, or a message that no decode worker sends, ends the link."""
    async with decode_port() as (port, server, address, made, heard):
        assert made.link_to(address) is None
        link, _ = await heard.next("up")
        assert server.send(Role.PREFILL, port.peer_id, message)
        lost, detail = await heard.next(FailureCode.INTEGRITY.value)
        assert lost is link
        assert address in detail


class Silent:
    """A handler that fails on any link that comes up or breaks."""

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        raise AssertionError("nobody is there")

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        raise AssertionError("it was never up")

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        raise AssertionError("nobody is there")


async def test_a_worker_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network.open()
    settings = LinkSettings(hello_timeout_s=0.05, peer_timeout_s=0.05)
    setup = Setup("p", 1, "unused", CollectorRegistry(), network, link_settings=settings)
    made = DecodeLinks(fake_card(), setup, Silent(), WireMetrics(setup.registry))
    assert made.link_to("tcp://127.0.0.1:1") is None
    made.sweep()
    assert len(made._peers) == 1
    monkeypatch.setattr(links, "_FORGET_S", -1.0)
    made.sweep()
    assert not made._peers
    await made.stop()
    await asyncio.to_thread(network.close)  # returns only if every socket is closed


class DecodePort:
    """A decode worker that welcomes every peer and fails on any message."""

    def __init__(self) -> None:
        self.data_address: str | None = "tcp://127.0.0.1:1"
        self.peer_id = ""

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        self.peer_id = hello.peer_id
        return Welcome(
            role=Role.DECODE,
            worker_id="decode",
            epoch=1,
            protocol=1,
            card=fake_card(),
            data_address=self.data_address,
        )

    def status(self) -> Status:
        return IDLE

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        raise AssertionError(f"nobody says {message}")

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """See ServerHandler."""


class Heard:
    """A handler that keeps the links' events in order."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, DecodeLink | None, str]] = asyncio.Queue()

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        self.events.put_nowait(("up", link, ""))

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        self.events.put_nowait((code.value, link, detail))

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        raise AssertionError(f"nobody says {message}")

    async def next(self, kind: str) -> tuple[DecodeLink | None, str]:
        async with asyncio.timeout(30):
            came, link, detail = await self.events.get()
        assert came == kind, detail
        return link, detail


@asynccontextmanager
async def decode_port() -> AsyncIterator[tuple[DecodePort, ControlServer, str, DecodeLinks, Heard]]:
    """A decode worker's control socket, and the links of a prefill worker to it."""
    network = Network.open()
    metrics, settings = WireMetrics(CollectorRegistry()), LinkSettings()
    port, heard = DecodePort(), Heard()
    server = ControlServer("tcp://127.0.0.1:*", port, settings, metrics=metrics, network=network)
    address = await server.start()
    setup = Setup("p", 1, "unused", CollectorRegistry(), network)
    made = DecodeLinks(fake_card(), setup, heard, metrics)
    try:
        yield port, server, address, made, heard
    finally:
        await made.stop()
        await server.stop()
        await asyncio.to_thread(network.close)  # returns only if every socket is closed


async def test_a_second_welcome_voids_what_went_over_the_first_link() -> None:
    """A decode worker says Welcome twice. The first link goes down, and a second one comes up."""
    async with decode_port() as (port, server, address, made, heard):
        assert made.link_to(address) is None
        first, _ = await heard.next("up")
        welcome = port.welcome(Hello(role=Role.PREFILL, peer_id=port.peer_id))
        assert server.send(Role.PREFILL, port.peer_id, welcome)
        down, _ = await heard.next("peer_lost")
        assert down is first
        second, _ = await heard.next("up")
        assert second is not first
        assert made.link_to(address) is second


async def test_a_link_whose_sender_cannot_be_made_is_told_of_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the block sender fails because no descriptor is left. The handler is told, and the next try brings the link up."""
    errors = [OSError(24, "Too many open files")]
    pipe = os.pipe

    def scarce() -> tuple[int, int]:
        if errors:
            raise errors.pop()
        return pipe()

    async with decode_port() as (_, _, address, made, heard):
        monkeypatch.setattr(os, "pipe", scarce)
        assert made.link_to(address) is None
        link, detail = await heard.next("peer_lost")
        assert link is None
        assert "Too many open files" in detail
        link, _ = await heard.next("up")
        assert made.link_to(address) is link


async def test_a_worker_that_takes_no_blocks_is_told_of_at_every_request() -> None:
    """A decode worker is connected but takes no KV blocks. Each request for a link is told so, not only the first."""
    async with decode_port() as (port, _, address, made, heard):
        port.data_address = None
        for _ in range(2):
            assert made.link_to(address) is None
            _, detail = await heard.next("invalid")
            assert "takes no KV blocks" in detail


async def test_a_link_whose_sender_has_died_is_made_anew() -> None:
    async with decode_port() as (_, _, address, made, heard):
        assert made.link_to(address) is None
        first, _ = await heard.next("up")
        sender = made._peers[address]._sender
        assert sender is not None
        sender.close()
        assert made.link_to(address) is None
        lost, detail = await heard.next(FailureCode.PEER_LOST.value)
        assert lost is first
        assert "KV blocks reach it no longer" in detail
        second, _ = await heard.next("up")
        assert second is not first


async def test_a_link_whose_sender_has_died_is_found_by_the_sweep_too() -> None:
    """No request asks for the link. The sweep finds the dead sender, and the handler is told."""
    async with decode_port() as (_, _, address, made, heard):
        assert made.link_to(address) is None
        first, _ = await heard.next("up")
        made.sweep()
        sender = made._peers[address]._sender
        assert sender is not None
        sender.close()
        made.sweep()
        lost, _ = await heard.next(FailureCode.PEER_LOST.value)
        assert lost is first


async def test_a_link_that_is_up_is_not_forgotten_however_long_nobody_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hand-offs may still be under way on a link that no request asks for."""
    monkeypatch.setattr(links, "_FORGET_S", -1.0)
    async with decode_port() as (_, _, address, made, heard):
        assert made.link_to(address) is None
        link, _ = await heard.next("up")
        made.sweep()
        assert made.link_to(address) is link


async def test_a_link_that_is_reset_comes_up_anew_when_it_is_asked_for() -> None:
    async with decode_port() as (_, _, address, made, heard):
        made.reset(address, "of no interest")  # there is no link yet
        assert made.link_to(address) is None
        first, _ = await heard.next("up")
        made.reset(address, "took no KV blocks for 30 s")
        down, detail = await heard.next("peer_lost")
        assert down is first
        assert detail.endswith("took no KV blocks for 30 s")
        assert made.link_to(address) is None
        second, _ = await heard.next("up")
        assert second is not first


async def test_a_data_connection_that_the_network_breaks_ends_the_link_at_once() -> None:
    """The data connection is cut while both workers and the control link live. The handler is told, and a new link works."""
    async with decode_port() as (port, _, address, made, heard):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as blocks:
            blocks.linger = 0
            cable = Cable(blocks.bind_to_random_port("tcp://127.0.0.1"))
            await cable.start()
            port.data_address = f"tcp://127.0.0.1:{cable.port}"
            assert made.link_to(address) is None
            first, _ = await heard.next("up")
            assert first is not None
            payload = memoryview(bytes(100))
            first.data.send(BlockHeader(1, 1, 0, 100, b"h" * 16), payload, None)
            assert await asyncio.to_thread(blocks.poll, 30_000)
            cable.cut()
            lost, _ = await heard.next(FailureCode.PEER_LOST.value)
            assert lost is first
            assert made.link_to(address) is None
            second, _ = await heard.next("up")
            assert second is not None
            assert second is not first
            second.data.send(BlockHeader(1, 1, 1, 100, b"h" * 16), payload, None)
            blocks.recv_multipart()
            assert await asyncio.to_thread(blocks.poll, 30_000)
            await made.stop()
            await cable.stop()
