"""Both ends of control links on real sockets, as events that a test can wait for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.codec import Codec
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.loop_socket import LoopSocket
from kvrelay.wire.messages import Hello, HelloRefused, Message, Role, Status, Welcome, WorkerState
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import ClientProof, PeerGate
from kvrelay.wire.settings import LinkSettings

WAIT_S = 10.0
# Only tests about silence use a short timeout: a busy machine must not look like a lost peer.
FAST = LinkSettings(ping_interval_s=0.02, peer_timeout_s=60, hello_timeout_s=60, reconnect_max_s=0.05)
# Of a server that is stopped and comes back: no connection of another process takes its port meanwhile.
OWN_ADDRESS = "tcp://127.0.0.2:0"
SOON_LOST = LinkSettings(ping_interval_s=0.02, peer_timeout_s=0.2, hello_timeout_s=60, reconnect_max_s=0.05)
IDLE = Status(
    state=WorkerState.READY,
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    num_free_blocks=1,
    num_blocks=1,
    max_running=1,
)


class Worker:
    """A server's handler: every message and loss becomes an event."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.refusal: HelloRefused | None = None
        self.error: Exception | None = None
        self.heard: asyncio.Queue[tuple[str, Role, Message]] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        if self.error is not None:
            raise self.error
        return self.refusal or Welcome(
            role=Role.DECODE, worker_id="w", epoch=self.epoch, protocol=1, card=fake_card(), data_address="tcp://x:1"
        )

    def status(self) -> Status:
        return IDLE

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        self.heard.put_nowait((peer_id, role, message))
        if self.error is not None:
            raise self.error

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        self.lost.put_nowait(peer_id)
        if self.error is not None:
            raise self.error


class Initiator:
    """A client's handler."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.events: asyncio.Queue[Any] = asyncio.Queue()  # all but Status
        self.statuses: asyncio.Queue[Status] = asyncio.Queue()

    def _hear(self, event: Any) -> None:
        self.events.put_nowait(event)
        if self.error is not None:
            raise self.error

    def on_welcome(self, welcome: Welcome) -> None:
        self._hear(welcome)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Status):
            self.statuses.put_nowait(message)
        else:
            self._hear(message)

    def on_lost(self, reason: str) -> None:
        self._hear(reason)

    def on_refused(self, refused: HelloRefused) -> None:
        self._hear(refused)


class Raw(zmq.asyncio.Socket):
    """A socket without a client behind it."""

    async def say(self, message: Message) -> None:
        await self.send(Codec().encode(message))

    async def hear(self) -> Message:
        return Codec().decode(await asyncio.wait_for(self.recv(), WAIT_S))

    async def ask(self, message: Message) -> Message:
        """Send a message and return the answer."""
        await self.say(message)
        return await self.hear()


class Net:
    """Makes servers and clients, and closes them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.network = Network(time.monotonic, context, LoopSocket, BlockSender, BlockReceiver)
        self.registry = CollectorRegistry()
        self.metrics = WireMetrics(self.registry)
        self.to_stop: list[ControlServer | ControlClient] = []
        self.address = ""  # of the last server that was linked

    def server(
        self,
        worker: Worker,
        address: str = "tcp://127.0.0.1:0",
        settings: LinkSettings = FAST,
        gate: PeerGate | None = None,
        **limits: int,
    ) -> ControlServer:
        server = ControlServer(
            address, worker, settings, metrics=self.metrics, network=self.network, gate=gate, **limits
        )
        self.to_stop.append(server)
        return server

    def client(
        self,
        address: str,
        initiator: Initiator,
        peer_id: str = "p",
        settings: LinkSettings = FAST,
        proof: ClientProof | None = None,
        **hello: Any,
    ) -> ControlClient:
        greeting = Hello(role=hello.pop("role", Role.PREFILL), peer_id=peer_id, **hello)
        client = ControlClient(
            address, greeting, initiator, settings, metrics=self.metrics, network=self.network, proof=proof
        )
        self.to_stop.append(client)
        client.start()
        return client

    async def linked(self, **server: Any) -> tuple[Worker, ControlServer, Initiator, ControlClient]:
        worker, initiator = Worker(), Initiator()
        control = self.server(worker, **server)
        self.address = await control.start()
        client = self.client(self.address, initiator)
        assert isinstance(await next_of(initiator.events), Welcome)
        return worker, control, initiator, client

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvrelay_{name}_total", labels) or 0.0

    def raw(self, address: str, routing_id: bytes = b"raw") -> Raw:
        socket = self._raw(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(address)
        return socket

    def raw_server(self) -> tuple[Raw, str]:
        """A server's socket that answers nothing by itself, and its address."""
        socket = self._raw(zmq.ROUTER)
        return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def _raw(self, kind: int) -> Raw:
        socket = zmq.asyncio.Context.shadow(self.context).socket(kind, socket_class=Raw)
        socket.linger = 0
        return socket

    async def stop(self, *ends: ControlServer | ControlClient) -> None:
        for end in ends:
            self.to_stop.remove(end)
            await end.stop()


async def next_of(events: asyncio.Queue[Any]) -> Any:
    return await asyncio.wait_for(events.get(), WAIT_S)
