"""Connections from a prefill worker to the decode workers that gateways name. They are made on demand and kept while they live.

A link is a control client and, once the decode worker has sent its data port, a block sender. A restarted decode worker has a new
epoch and gets a new sender, so frames queued for its old process never reach the new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvrelay.common.late_bytes import Register
from kvrelay.common.model_card import ModelCard
from kvrelay.wire.addresses import data_address
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.shared.sender import SharedTarget
from kvrelay.wire.messages import (
    FailureCode,
    Hello,
    HelloRefused,
    Message,
    Role,
    Status,
    Welcome,
    worker_peer_id,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.security.authentication import ClientProof
from kvrelay.wire.transfers.transfer import DecodeLink, absurdity
from kvrelay.worker.setup import Setup

logger = logging.getLogger(__name__)

_FORGET_S = 60.0
_MUTE = "KV blocks reach it no longer"


class LinkHandler(Protocol):
    """Receives the events of links. The service implements it."""

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        """Offers can be sent from now on."""

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        """The decode worker is lost, or refuses this worker. ``link`` was up until now, or is None."""

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        """The decode worker sent a message."""


class _Peer:
    """One decode worker's address, its link and its sender. Implements :class:`kvrelay.wire.control.client.ClientHandler`."""

    def __init__(self, address: str, links: DecodeLinks, on_mute: Callable[[], object]) -> None:
        """``on_mute``: called on any thread when the sender has ended by itself."""
        self.address = address
        self.link: DecodeLink | None = None
        self.unfit: tuple[FailureCode, str] | None = None  # why the current process there will never take our blocks
        self.asked_s = 0.0  # when a request last named the address
        self._links = links
        self._on_mute = on_mute
        self._told = ""  # last problem in the log
        self._sender: BlockSender | None = None
        self._closed: BlockSender | None = None  # the last one that was closed
        card, setup, metrics = links.card, links.setup, links.metrics
        hello = Hello(
            role=Role.PREFILL,
            peer_id=worker_peer_id(setup.worker_id, setup.epoch),
            layout=card.layout,
            seals_kv=setup.seal_kv,
        )
        proof = None if setup.keys is None else ClientProof(setup.keys, Role.DECODE)
        settings = setup.link_settings.between_workers()
        self.client = ControlClient(address, hello, self, settings, metrics=metrics, network=setup.network, proof=proof)

    @property
    def is_mute(self) -> bool:
        """Whether the link seems to be up, but its sender has ended, so that no block would be sent."""
        return self._sender is not None and not self._sender.is_alive

    def on_welcome(self, welcome: Welcome) -> None:
        """The decode worker accepts offers from now on."""
        if self.link is not None:  # earlier promises are void, and the old sender with them
            self.fail(FailureCode.PEER_LOST, f"decode worker {self.address} said Welcome again")
        if welcome.data_address is None:
            self._refuse(FailureCode.INVALID, f"{self.address} is a {welcome.role} worker: it takes no KV blocks")
            return
        setup, nbytes = self._links.setup, self._links.card.layout.geometry.physical_nbytes
        register = None if setup.seal_kv else self._links.register  # a seal needs the host
        self._sender = setup.network.block_sender(
            data_address(self.address, welcome.data_address),
            metrics=self._links.metrics,
            context=setup.network.context,
            token=welcome.data_token,
            shared=SharedTarget(welcome.shared_memory, setup.shared_memory, nbytes, welcome.data_token, register),
            on_end=self._on_mute,
        )
        self.link = DecodeLink(self.client, self._sender, setup.seal_kv)
        self._told = ""
        logger.info(
            "connected to decode worker %s at %s, protocol %d", welcome.worker_id, self.address, welcome.protocol
        )
        self._links.handler.on_link_up(self.address, self.link)

    def on_message(self, message: Message) -> None:
        """Pass an answer on. If an answer makes no sense, end the link."""
        if self.link is None or isinstance(message, Status):
            return
        absurd = absurdity(message)
        if absurd is None:
            self._links.handler.on_link_message(self.link, message)
        else:
            self._refuse(FailureCode.INTEGRITY, f"decode worker {self.address}: {absurd}")

    def on_lost(self, reason: str) -> None:
        """The decode worker is lost or has restarted."""
        self.unfit = None
        self.fail(FailureCode.PEER_LOST, f"decode worker {self.address}: {reason}")

    def on_refused(self, refused: HelloRefused) -> None:
        """The decode worker does not take this worker's KV."""
        self.fail(refused.code, f"decode worker {self.address}: {refused.detail}")

    async def stop(self) -> None:
        """Close both sockets."""
        self._close_sender()
        if self._closed is not None:
            await asyncio.to_thread(self._closed.join)
        await self.client.stop()

    def fail(self, code: FailureCode, detail: str) -> None:
        """End the link and tell the handler why. Tickets say when no send reads this worker's blocks any more."""
        if detail != self._told:  # a worker that refuses does so at every retry: log it once
            logger.warning("%s", detail)
        self._told = detail
        link, self.link = self.link, None
        self._close_sender()
        self._links.handler.on_link_down(self.address, link, code, detail)

    def _refuse(self, code: FailureCode, detail: str) -> None:
        self.unfit = (code, detail)
        self.fail(code, detail)

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._closed, self._sender = self._sender, None


class DecodeLinks:
    """All links of a prefill worker, by control address. Asyncio loop only."""

    def __init__(
        self,
        card: ModelCard,
        setup: Setup,
        handler: LinkHandler,
        metrics: WireMetrics,
        register: Register | None = None,
    ) -> None:
        self.card = card
        self.setup = setup
        self.handler = handler
        self.metrics = metrics
        self.register = register
        self._clock = setup.network.clock
        self._peers: dict[str, _Peer] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def link_to(self, address: str) -> DecodeLink | None:
        """The link to ``address`` if it is up. Otherwise None; ``on_link_up`` or ``on_link_down`` will follow."""
        peer = self._peers.get(address)
        if peer is not None and peer.is_mute:
            self.reset(address, _MUTE)
            peer = None
        if peer is None:
            sweep_now = partial(asyncio.get_running_loop().call_soon_threadsafe, self.sweep)
            peer = _Peer(address, self, sweep_now)
            self._peers[address] = peer
            peer.client.start()
        peer.asked_s = self._clock()
        if peer.link is None:  # the gateway that names the address has a link to it: a restarted worker is up again
            peer.client.hurry()
        if peer.unfit is not None:  # no second Welcome will come, so nothing else would follow
            asyncio.get_running_loop().call_soon(self.handler.on_link_down, address, None, *peer.unfit)
        return peer.link

    def reset(self, address: str, reason: str) -> None:
        """End a link that is connected but does not work: ``on_link_down`` now, and a new link at the next ``link_to``."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            self.metrics.lost_peers.inc()
            peer.fail(FailureCode.PEER_LOST, f"decode worker {address}: {reason}")
            self._stop_behind(peer)

    def sweep(self) -> None:
        """Forget decode workers that are down and no longer named by requests: pods come back under new addresses."""
        for address, peer in list(self._peers.items()):
            if peer.is_mute:
                self.reset(address, _MUTE)
            elif peer.link is None and self._clock() - peer.asked_s > _FORGET_S:
                logger.info("forgetting decode worker %s: down, and no longer asked for", address)
                del self._peers[address]
                self._stop_behind(peer)

    async def stop(self) -> None:
        """Close all links."""
        await asyncio.gather(*self._stopping, *(peer.stop() for peer in self._peers.values()))
        self._peers.clear()
        await asyncio.gather(*self._stopping)  # links that broke meanwhile

    def _stop_behind(self, peer: _Peer) -> None:
        task = asyncio.create_task(peer.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
