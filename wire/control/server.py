"""A worker's end of control links: a ROUTER that knows its peers.

A peer is known from its ``Hello`` until it says ``Bye``, its connection breaks, it falls silent, or it says ``Hello`` again. Then
its earlier requests are void, and the handler is told. With keys, the key of each message decides the role of its sender. So a
gateway cannot speak as a prefill worker.

A connection's routing id is random. ``Hello`` gives the connection a role and a name. Names of different roles are different peers,
so no peer gets a message for another role. The latest ``Hello`` of a name wins.

All of it runs on one asyncio loop. Sending never blocks: a message that cannot be queued is reported as not sent.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import zmq

from kvrelay.wire.addresses import SocketFile, with_brackets
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, Codec
from kvrelay.wire.errors import MalformedMessageError, WireError
from kvrelay.wire.loop_socket import LoopSocket
from kvrelay.wire.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Bye,
    FailureCode,
    Hello,
    HelloRefused,
    Message,
    Ping,
    Role,
    Status,
    Welcome,
    common_protocol,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import PeerGate, receive_with_role
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.sockets import allow_family, bound_strangers, configure_control

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 1000  # strangers that get a log line
_MAX_DETAIL = 1000  # characters of text that a peer may have chosen, in a log line or an answer
_MAX_NAME = 255  # characters of a peer's name
_BREAKS_S = 0.05  # connections that break within this time are looked for together, also by strangers who come and go


class ServerHandler(Protocol):
    """Callbacks of a control server."""

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Decide on a peer that has a protocol number in common with this build."""

    def status(self) -> Status:
        """The answer to a Ping."""

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """A message from a peer that was welcomed."""

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """The peer is gone or has restarted: its requests are void."""


@dataclass(slots=True)
class _Peer:
    role: Role
    peer_id: str  # its name, by its Hello
    heard_s: float


class ControlServer:
    """A worker's control socket. ``start`` and ``stop`` once each."""

    def __init__(
        self,
        address: str,
        handler: ServerHandler,
        settings: LinkSettings,
        *,
        metrics: WireMetrics,
        network: Network,
        gate: PeerGate | None = None,
        max_frame_nbytes: int = MAX_CONTROL_FRAME_NBYTES,
    ) -> None:
        """``gate``: who may connect; started and stopped with the server. None: everybody, and nothing is encrypted.

        ``max_frame_nbytes``: the largest message to receive.
        """
        self._address = with_brackets(address)
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._max_frame_nbytes = max_frame_nbytes
        self._codec = Codec(max_frame_nbytes)
        self._peers: dict[bytes, _Peer] = {}  # by routing id
        self._routes: dict[tuple[Role, str], bytes] = {}  # role and name to routing id
        self._strangers: set[str] = set()
        self._network = network
        self._clock = network.clock
        self._router = network.context.socket(zmq.ROUTER)
        self._gate = gate
        receive = None if gate is None else receive_with_role
        self._socket = network.loop_socket(self._router, self._on_frames, receive)
        self._monitor: LoopSocket | None = None  # tells of broken connections
        self._looking: asyncio.TimerHandle | None = None  # for the peers whose connections broke
        self._sweeper: asyncio.Task[None] | None = None
        self._file: SocketFile | None = None

    async def start(self) -> str:
        """Listen. Returns the bound address. Raises WireError if it cannot listen there."""
        configure_control(self._router, self._settings, self._max_frame_nbytes)
        bound_strangers(self._router)
        allow_family(self._router, self._address)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._gate is not None:
            self._gate.start()
            self._gate.guard(self._router)
        try:
            self._router.bind(self._address)
        except zmq.ZMQError as error:
            self._router.close()
            if self._gate is not None:
                self._gate.stop()
            raise WireError(f"cannot listen on {self._address}: {error}; choose another --address") from error
        address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile(address)
        watched = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watched.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop ZeroMQ's thread, and with it all connections
        self._monitor = self._network.loop_socket(watched, self._on_break)
        self._monitor.start()
        self._socket.start()
        self._sweeper = asyncio.create_task(self._sweep())
        return address

    @property
    def is_alive(self) -> bool:
        """Whether messages are being received, and new peers let in."""
        has_gate = self._gate is None or self._gate.is_alive()
        return has_gate and self._socket.is_alive and self._sweeper is not None and not self._sweeper.done()

    def send(self, role: Role, peer_id: str, message: Message) -> bool:
        """Queue a message; False if no peer of ``role`` has that name, or it is not connected. Never blocks."""
        routing_id = self._routes.get((role, peer_id))
        return routing_id is not None and self._answer(routing_id, message)

    def _answer(self, routing_id: bytes, message: Message) -> bool:
        return self._socket.send([routing_id, self._codec.encode(message)])

    async def stop(self) -> None:
        """Close the socket. Queued messages get a moment to leave."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
        if self._monitor is not None:
            self._router.disable_monitor()
            self._monitor.close(linger_ms=0)
            self._monitor = None
        self._socket.close(linger_ms=200)
        if self._gate is not None:
            self._gate.stop()
        if self._file is not None:
            self._file.remove()

    def _on_frames(self, frames: list[bytes]) -> None:
        proved = frames.pop().decode() if self._gate is not None else None
        routing_id = frames[0]
        if len(frames) != 2:
            self._refuse_frame("malformed", routing_id, f"{len(frames) - 1} frames; a message is one")
            return
        try:
            message = self._codec.decode(frames[1])
        except MalformedMessageError as error:
            self._refuse_frame("malformed", routing_id, str(error))
            return
        if isinstance(message, Hello):
            self._on_hello(routing_id, message, proved)
            return
        peer = self._peers.get(routing_id)
        if peer is None:
            # A peer that was dropped, or that knew an earlier process at this address, says Hello then at once.
            self._metrics.refused_messages.labels("before_hello").inc()
            logger.debug("%s before Hello from %s", type(message).__name__, routing_id[:64].hex())
            self._answer(routing_id, HelloRefused(code=FailureCode.PEER_LOST, detail="not known here: say Hello"))
            return
        if proved not in (None, peer.role.value):
            self._refuse_frame("wrong_role", routing_id, f"sent by a {proved} in the name of a {peer.role}")
            return
        peer.heard_s = self._clock()
        if isinstance(message, Ping):
            self._answer(routing_id, self._handler.status())
        elif isinstance(message, Bye):
            self._drop(routing_id)
        else:
            self._handler.on_message(peer.peer_id, peer.role, message)

    def _on_hello(self, routing_id: bytes, hello: Hello, proved: str | None) -> None:
        answer = self._hello_refusal(hello, proved) or self._welcome(routing_id, hello)
        if isinstance(answer, Welcome):
            self._peers[routing_id] = _Peer(hello.role, hello.peer_id, self._clock())
            self._routes[hello.role, hello.peer_id] = routing_id
        else:
            self._metrics.refused_hellos.labels(answer.code.value).inc()
            self._warn_once(hello.peer_id[:_MAX_NAME], f"refused a {hello.role}: {answer.detail}")
        self._answer(routing_id, answer)

    def _hello_refusal(self, hello: Hello, proved: str | None) -> HelloRefused | None:
        """Why a Hello is ignored, so that it does not end an earlier session either; None if it is valid."""
        if proved not in (None, hello.role.value):
            detail = f"a {hello.role} by its Hello, a {proved} by its key"
        elif not 0 < len(hello.peer_id) <= _MAX_NAME or not hello.peer_id.isprintable():  # it goes into logs
            detail = f"a peer_id of {len(hello.peer_id)} characters; it must have 1 to {_MAX_NAME}, all printable"
        else:
            return None
        return HelloRefused(code=FailureCode.INVALID, detail=detail)

    def _welcome(self, routing_id: bytes, hello: Hello) -> Welcome | HelloRefused:
        """The answer to a valid Hello. It ends earlier sessions of the same connection or name."""
        for former in (routing_id, self._routes.get((hello.role, hello.peer_id))):
            if former in self._peers:
                self._drop(former)
        if common_protocol(hello) is None:
            detail = (
                f"no common protocol: yours {hello.protocol_min} to {hello.protocol_max}, mine {PROTOCOL_MIN} to {PROTOCOL_MAX}; "
                "upgrade through a version that speaks both (docs/upgrading.md)"
            )
            return HelloRefused(code=FailureCode.INVALID, detail=detail)
        answer = self._handler.welcome(hello)
        if isinstance(answer, HelloRefused) and len(answer.detail) > _MAX_DETAIL:
            return HelloRefused(code=answer.code, detail=f"{answer.detail[:_MAX_DETAIL]} …")
        return answer

    def _refuse_frame(self, cause: str, routing_id: bytes, detail: str) -> None:
        self._metrics.refused_messages.labels(cause).inc()
        peer = self._peers.get(routing_id)
        name = routing_id[:64].hex() if peer is None else peer.peer_id
        self._warn_once(name, f"dropped a control frame: {detail[:_MAX_DETAIL]}")

    def _warn_once(self, name: str, text: str) -> None:
        """Log one line per stranger, for a bounded number of strangers, so that they cannot fill a disk."""
        if name not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
            self._strangers.add(name)
            logger.warning("%s", text, extra={"peer_id": name if name.isprintable() else name.encode().hex()})

    def _on_break(self, _event: list[bytes]) -> None:
        """A connection broke. The event does not say whose, and ZeroMQ gives the peer up a moment later."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_BREAKS_S, self._drop_broken)

    def _drop_broken(self) -> None:
        """Drop the peers without a connection: a Status cannot be queued for them."""
        self._looking = None
        status = self._handler.status()
        for routing_id, peer in list(self._peers.items()):
            if not self._answer(routing_id, status):
                self._lose(routing_id, peer, "its connection broke")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.ping_interval_s)
            now_s = self._clock()
            silent = [one for one, peer in self._peers.items() if now_s - peer.heard_s > self._patience_s(peer)]
            for routing_id in silent:
                peer = self._peers[routing_id]
                self._lose(routing_id, peer, f"silent for {now_s - peer.heard_s:.1f} s")

    def _patience_s(self, peer: _Peer) -> float:
        settings = self._settings.between_workers() if peer.role is Role.PREFILL else self._settings
        return settings.peer_timeout_s

    def _lose(self, routing_id: bytes, peer: _Peer, reason: str) -> None:
        logger.warning("%s %s is lost: %s", peer.role, peer.peer_id, reason)
        self._metrics.lost_peers.inc()
        self._drop(routing_id)

    def _drop(self, routing_id: bytes) -> None:
        peer = self._peers.pop(routing_id)
        del self._routes[peer.role, peer.peer_id]
        try:
            self._handler.on_peer_lost(peer.peer_id, peer.role)
        except Exception:
            logger.exception("a handler failed on a lost peer; the server goes on")
