"""Control links: a ROUTER on every worker, a DEALER on whoever initiates.

A client's life: connect, ``Hello``, ``Welcome``, then messages both ways and a ``Ping`` every so often. When the connection breaks,
the server falls silent, or it restarted, the client says so (``on_lost``), throws the socket away and begins anew with
backoff, for ever. A server knows a peer from its ``Hello`` until it says ``Bye``, falls silent, or says ``Hello`` again: then
what the peer asked for before is void, and the handler is told.

All of it runs on one asyncio loop. Sending never blocks: a message that cannot be queued is reported as not sent.

With keys, a peer is what its key says, in every message: a gateway cannot speak as a prefill worker, whatever it calls itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import zmq

from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.authentication import ClientProof, PeerGate, receive_with_role
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
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.sockets import close_dead_connections

logger = logging.getLogger(__name__)

_Event = TypeVar("_Event")

_SEND_QUEUE = 100_000  # messages to one peer; a peer that reads nothing is lost long before
_FIRST_PAUSE_S = 0.25  # before the first new try; at most
_TIMER_S = 0.001  # a loop's timers are no finer, and one that fires early would fire again and again


class ServerHandler(Protocol):
    """What a worker makes of its peers."""

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Decide on a peer whose protocol version fits."""

    def status(self) -> Status:
        """The answer to a Ping."""

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """A message from a peer that was welcomed."""

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """The peer is gone, or started anew: what it asked for is void."""


class ClientHandler(Protocol):
    """What an initiator makes of its worker."""

    def on_welcome(self, welcome: Welcome) -> None:
        """The link is up."""

    def on_message(self, message: Message) -> None:
        """A message, Status included."""

    def on_lost(self, reason: str) -> None:
        """The link was up and is not any more; the client tries again by itself."""

    def on_refused(self, refused: HelloRefused) -> None:
        """The worker does not talk to us; the client tries again by itself, in case the worker changes."""


@dataclass(slots=True)
class _Peer:
    role: Role
    heard_s: float


def _configure(socket: zmq.Socket[bytes], settings: LinkSettings) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_FRAME_NBYTES)
    close_dead_connections(socket, settings.peer_timeout_s)


class ControlServer:
    """A worker's control socket. ``start`` and ``stop`` once each."""

    def __init__(
        self,
        address: str,
        handler: ServerHandler,
        settings: LinkSettings,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        gate: PeerGate | None = None,
    ) -> None:
        """``gate``: who may connect; started and stopped with the server. None: everybody, and nothing is encrypted."""
        self._address = address
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._codec = Codec()
        self._peers: dict[str, _Peer] = {}
        self._strangers: set[bytes] = set()
        self._router = context.socket(zmq.ROUTER)
        self._gate = gate
        self._socket = LoopSocket(self._router, self._on_frames, None if gate is None else receive_with_role)
        self._sweeper: asyncio.Task[None] | None = None
        self._file: SocketFile | None = None

    async def start(self) -> str:
        """Listen; returns the real address. Raises WireError if it cannot be had."""
        _configure(self._router, self._settings)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
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
        self._socket.start()
        self._sweeper = asyncio.create_task(self._sweep())
        return address

    @property
    def is_alive(self) -> bool:
        """Whether messages are being received."""
        return self._socket.is_alive and self._sweeper is not None and not self._sweeper.done()

    def send(self, peer_id: str, message: Message) -> bool:
        """Queue a message; False if the peer is not connected. Never blocks."""
        return self._socket.send([peer_id.encode(), self._codec.encode(message)])

    async def stop(self) -> None:
        """Close the socket. Queued messages get a moment to leave."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self._socket.close(linger_ms=200)
        if self._gate is not None:
            self._gate.stop()
        if self._file is not None:
            self._file.remove()

    def _on_frames(self, frames: list[bytes]) -> None:
        proved = frames.pop().decode() if self._gate is not None else None
        if len(frames) != 2:
            self._refuse_frame("malformed", frames[0], f"{len(frames) - 1} frames; a message is one")
            return
        try:
            message = self._codec.decode(frames[1])
        except MalformedMessageError as error:
            self._refuse_frame("malformed", frames[0], str(error))
            return
        peer_id = frames[0].decode(errors="replace")
        if isinstance(message, Hello):
            self._on_hello(peer_id, message, proved)
            return
        peer = self._peers.get(peer_id)
        if peer is not None and proved not in (None, peer.role.value):
            self._refuse_frame("wrong_role", frames[0], f"sent by a {proved} in the name of a {peer.role}")
            return
        if peer is None:
            self._refuse_frame("before_hello", frames[0], f"{type(message).__name__} before Hello")
            # A peer that was dropped for its silence, or that knew this process's predecessor, learns it at once.
            self.send(peer_id, HelloRefused(code=FailureCode.PEER_LOST, detail="not known here: say Hello"))
            return
        peer.heard_s = time.monotonic()
        if isinstance(message, Ping):
            self.send(peer_id, self._handler.status())
        elif isinstance(message, Bye):
            self._drop(peer_id)
        else:
            self._handler.on_message(peer_id, peer.role, message)

    def _on_hello(self, peer_id: str, hello: Hello, proved: str | None) -> None:
        is_proved = proved in (None, hello.role.value)
        if is_proved and peer_id in self._peers:
            self._drop(peer_id)
        protocol = min(hello.protocol_max, PROTOCOL_MAX)
        answer: Welcome | HelloRefused
        if not is_proved:
            answer = HelloRefused(
                code=FailureCode.INVALID, detail=f"a {hello.role} by its Hello, a {proved} by its key"
            )
        elif hello.peer_id != peer_id:
            answer = HelloRefused(code=FailureCode.INVALID, detail="peer_id is not the routing id")
        elif protocol < max(hello.protocol_min, PROTOCOL_MIN):
            detail = (
                f"no common protocol version: yours {hello.protocol_min} to {hello.protocol_max}, "
                f"mine {PROTOCOL_MIN} to {PROTOCOL_MAX}"
            )
            answer = HelloRefused(code=FailureCode.INVALID, detail=detail)
        else:
            answer = self._handler.welcome(hello)
        if isinstance(answer, Welcome):
            self._peers[peer_id] = _Peer(hello.role, time.monotonic())
        else:
            self._metrics.refused_hellos.labels(answer.code.value).inc()
            logger.warning("refused a %s: %s", hello.role, answer.detail, extra={"peer_id": peer_id})
        self.send(peer_id, answer)

    def _refuse_frame(self, cause: str, routing_id: bytes, detail: str) -> None:
        self._metrics.refused_messages.labels(cause).inc()
        if routing_id not in self._strangers and len(self._strangers) < 1000:  # one line per stranger
            self._strangers.add(routing_id)
            logger.warning("dropped a control frame: %s", detail, extra={"peer_id": routing_id[:64].hex()})

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.ping_interval_s)
            now_s = time.monotonic()
            silent = [peer_id for peer_id, peer in self._peers.items() if now_s - peer.heard_s > self._patience_s(peer)]
            for peer_id in silent:
                logger.warning(
                    "peer silent for %.1f s", now_s - self._peers[peer_id].heard_s, extra={"peer_id": peer_id}
                )
                self._metrics.lost_peers.inc()
                self._drop(peer_id)

    def _patience_s(self, peer: _Peer) -> float:
        settings = self._settings.between_workers() if peer.role is Role.PREFILL else self._settings
        return settings.peer_timeout_s

    def _drop(self, peer_id: str) -> None:
        peer = self._peers.pop(peer_id)
        try:
            self._handler.on_peer_lost(peer_id, peer.role)
        except Exception:
            logger.exception("a handler failed on a lost peer; the server goes on")


class ControlClient:
    """A link to one worker. ``start`` and ``stop`` once each; in between it reconnects by itself."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        handler: ClientHandler,
        settings: LinkSettings,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        proof: ClientProof | None = None,
    ) -> None:
        """``proof``: who we are, and who the worker must be; without, nothing is encrypted."""
        self.address = address
        self._hello = hello
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._context = context
        self._proof = proof
        self._codec = Codec()
        self._socket: LoopSocket | None = None
        self._is_up = False
        self._heard_s = 0.0  # monotonic
        self._end_reason: str | None = None  # of the session
        self._changed = asyncio.Event()  # the session is up, or at its end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, on the running loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def is_up(self) -> bool:
        """Whether the worker welcomed us and has not been lost since."""
        return self._is_up

    def send(self, message: Message) -> bool:
        """Queue a message; False if the link is not up. Never blocks."""
        return self._is_up and self._send(message)

    async def stop(self) -> None:
        """Say Bye and close. The handler hears nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, message: Message) -> bool:
        return self._socket is not None and self._socket.send([self._codec.encode(message)])

    async def _run(self) -> None:
        first_pause_s = pause_s = min(self._settings.ping_interval_s / 4, _FIRST_PAUSE_S)
        while True:
            dealer = self._context.socket(zmq.DEALER)
            _configure(dealer, self._settings)
            dealer.setsockopt(zmq.ROUTING_ID, self._hello.peer_id.encode())
            if self._proof is not None:
                self._proof.guard(dealer)
            monitor = LoopSocket(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED), self._on_disconnected)
            self._socket = LoopSocket(dealer, self._on_frames)
            self._end_reason = None
            self._changed.clear()
            linger_ms = 0
            try:
                dealer.connect(self.address)
                monitor.start()
                self._socket.start()
                reason = await self._session()
            except asyncio.CancelledError:
                linger_ms = 200  # for the Bye
                self.send(Bye())
                raise
            finally:
                was_up, self._is_up = self._is_up, False
                dealer.disable_monitor()
                monitor.close(linger_ms=0)
                self._socket.close(linger_ms)
            if was_up:
                pause_s = first_pause_s
                self._metrics.lost_peers.inc()
                self._handle(self._handler.on_lost, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._settings.reconnect_max_s)

    async def _session(self) -> str:
        """Talk until the link breaks; returns why."""
        self._send(self._hello)
        self._heard_s = pinged_s = time.monotonic()
        while self._end_reason is None:
            now_s = time.monotonic()
            limit_s = self._settings.peer_timeout_s if self._is_up else self._settings.hello_timeout_s
            if now_s - self._heard_s > limit_s:
                return f"silent for {limit_s:g} s"
            wait_s = self._heard_s + limit_s - now_s
            if self._is_up:
                if now_s - pinged_s >= self._settings.ping_interval_s:
                    pinged_s = now_s
                    self._send(Ping())
                wait_s = min(wait_s, pinged_s + self._settings.ping_interval_s - now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s + _TIMER_S):
                    await self._changed.wait()
            self._changed.clear()
        return self._end_reason

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._changed.set()

    def _on_disconnected(self, _event: list[bytes]) -> None:
        self._end("the connection broke")

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard_s = time.monotonic()
        if self._end_reason is not None:
            return  # what comes after the end is of a session that nobody holds any more
        try:
            message = self._codec.decode(frames[0] if len(frames) == 1 else b"".join(frames))
        except MalformedMessageError as error:
            self._metrics.refused_messages.labels("malformed").inc()
            logger.warning("dropped a control frame from %s: %s", self.address, error)
            return
        if isinstance(message, HelloRefused):
            if self._is_up:
                self._end(message.detail)  # it forgot us, or is another process by now
            else:
                self._handle(self._handler.on_refused, message)
                self._end(f"refused: {message.detail}")
        elif isinstance(message, Welcome):
            self._is_up = True
            self._changed.set()
            self._handle(self._handler.on_welcome, message)
        elif self._is_up:
            self._handle(self._handler.on_message, message)

    def _handle(self, call: Callable[[_Event], None], event: _Event) -> None:
        try:
            call(event)
        except Exception:
            logger.exception("a handler failed on %s; the link goes on", type(event).__name__)
