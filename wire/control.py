"""Control links: a ROUTER on every worker, a DEALER on whoever initiates.

A client's life: connect, ``Hello``, ``Welcome``, then messages both ways and a ``Ping`` every so often. When the connection breaks,
the server falls silent, or it restarted, the client says so (``on_lost``), throws the socket away and begins anew with
backoff, for ever. A server knows a peer from its ``Hello`` until it says ``Bye``, falls silent, or says ``Hello`` again: then
what the peer asked for before is void, and the handler is told.

All of it runs on one asyncio loop. Sending never blocks: a message that cannot be queued is reported as not sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import zmq
import zmq.asyncio

from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, Codec
from kvrelay.wire.errors import MalformedMessageError, WireError
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

logger = logging.getLogger(__name__)

_Event = TypeVar("_Event")

_SEND_QUEUE = 100_000  # messages to one peer; a peer that reads nothing is lost long before


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


def _configure(socket: zmq.Socket[Any], settings: LinkSettings) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_FRAME_NBYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.ping_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.peer_timeout_s * 1000))


def _was_done(sending: Any) -> bool:
    """Whether a DONTWAIT send succeeded: pyzmq completes its future before it returns it."""
    return cast("asyncio.Future[Any]", sending).exception() is None


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
    ) -> None:
        self._address = address
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._codec = Codec()
        self._peers: dict[str, _Peer] = {}
        self._strangers: set[bytes] = set()
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.shadow(context).socket(zmq.ROUTER)
        self._tasks: list[asyncio.Task[None]] = []
        self._file: SocketFile | None = None

    async def start(self) -> str:
        """Listen; returns the real address. Raises WireError if it cannot be had."""
        _configure(self._socket, self._settings)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise WireError(f"cannot listen on {self._address}: {error}; choose another --address") from error
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile(address)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._sweep())]
        return address

    @property
    def is_alive(self) -> bool:
        """Whether messages are being received."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def send(self, peer_id: str, message: Message) -> bool:
        """Queue a message; False if the peer is not connected. Never blocks."""
        if self._socket.closed:
            return False
        frames = [peer_id.encode(), self._codec.encode(message)]
        return _was_done(self._socket.send_multipart(frames, flags=zmq.DONTWAIT))

    async def stop(self) -> None:
        """Close the socket. Queued messages get a moment to leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=200)
        if self._file is not None:
            self._file.remove()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._on_frames(frames)
            except Exception:
                logger.exception("a handler failed on a message; the link goes on")

    def _on_frames(self, frames: list[bytes]) -> None:
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
            self._on_hello(peer_id, message)
            return
        peer = self._peers.get(peer_id)
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

    def _on_hello(self, peer_id: str, hello: Hello) -> None:
        if peer_id in self._peers:
            self._drop(peer_id)
        protocol = min(hello.protocol_max, PROTOCOL_MAX)
        answer: Welcome | HelloRefused
        if hello.peer_id != peer_id:
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
            silent_since_s = time.monotonic() - self._settings.peer_timeout_s
            for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.heard_s < silent_since_s]:
                logger.warning("peer silent for %.1f s", self._settings.peer_timeout_s, extra={"peer_id": peer_id})
                self._metrics.lost_peers.inc()
                self._drop(peer_id)

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
    ) -> None:
        self.address = address
        self._hello = hello
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._context = zmq.asyncio.Context.shadow(context)
        self._codec = Codec()
        self._socket: zmq.asyncio.Socket | None = None
        self._is_up = False
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
        if self._socket is None or self._socket.closed:
            return False
        return _was_done(self._socket.send(self._codec.encode(message), flags=zmq.DONTWAIT))

    async def _run(self) -> None:
        first_pause_s = pause_s = self._settings.ping_interval_s / 4
        while True:
            self._socket = self._context.socket(zmq.DEALER)
            _configure(self._socket, self._settings)
            self._socket.setsockopt(zmq.ROUTING_ID, self._hello.peer_id.encode())
            monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            linger_ms = 0
            try:
                self._socket.connect(self.address)
                reason = await self._session(self._socket, monitor)
            except asyncio.CancelledError:
                linger_ms = 200  # for the Bye
                self.send(Bye())
                raise
            finally:
                was_up, self._is_up = self._is_up, False
                self._socket.disable_monitor()
                monitor.close(linger=0)
                self._socket.close(linger=linger_ms)
            if was_up:
                pause_s = first_pause_s
                self._metrics.lost_peers.inc()
                self._handle(self._handler.on_lost, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._settings.reconnect_max_s)

    async def _session(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> str:
        """Talk until the link breaks; returns why."""
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        self._send(self._hello)
        heard_s = pinged_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            limit_s = self._settings.peer_timeout_s if self._is_up else self._settings.hello_timeout_s
            if now_s - heard_s > limit_s:
                return f"silent for {limit_s:g} s"
            if self._is_up and now_s - pinged_s >= self._settings.ping_interval_s:
                pinged_s = now_s
                self._send(Ping())
            wait_s = heard_s + limit_s - now_s
            if self._is_up:
                wait_s = min(wait_s, pinged_s + self._settings.ping_interval_s - now_s)
            ready = dict(await poller.poll(max(1, int(wait_s * 1000) + 1)))
            if socket in ready:
                heard_s = time.monotonic()
                refused = self._receive_all(socket)
                if refused is not None:
                    return refused
            if monitor in ready:
                return "the connection broke"

    def _receive_all(self, socket: zmq.asyncio.Socket) -> str | None:
        """Take all messages there are; a reason to end the session, or None."""
        while True:
            received = cast("asyncio.Future[list[bytes]]", socket.recv_multipart(flags=zmq.DONTWAIT))
            if received.exception() is not None:
                return None  # nothing more
            try:
                message = self._codec.decode(b"".join(received.result()))
            except MalformedMessageError as error:
                self._metrics.refused_messages.labels("malformed").inc()
                logger.warning("dropped a control frame from %s: %s", self.address, error)
                continue
            if isinstance(message, HelloRefused):
                if self._is_up:
                    return message.detail  # it forgot us, or is another process by now
                self._handle(self._handler.on_refused, message)
                return f"refused: {message.detail}"
            if isinstance(message, Welcome):
                self._is_up = True
                self._handle(self._handler.on_welcome, message)
            elif self._is_up:
                self._handle(self._handler.on_message, message)

    def _handle(self, call: Callable[[_Event], None], event: _Event) -> None:
        try:
            call(event)
        except Exception:
            logger.exception("a handler failed on %s; the link goes on", type(event).__name__)
