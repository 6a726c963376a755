"""The client end of a control link: a DEALER that reconnects until it is stopped.

Its life: connect, ``Hello``, ``Welcome``, then messages both ways and a periodic ``Ping``. When the connection breaks, the
worker falls silent, or it restarted, the client says so (``on_lost``), throws the socket away and begins anew with backoff.

All of it runs on one asyncio loop. Sending never blocks: a message that cannot be queued is reported as not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

import zmq

from kvrelay.wire.codec import Codec
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.loop_socket import LoopSocket
from kvrelay.wire.messages import (
    Bye,
    FailureCode,
    Hello,
    HelloRefused,
    Message,
    Ping,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import WATCHED_EVENTS, ClientProof, handshake_problem
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.sockets import allow_family, configure_control

logger = logging.getLogger(__name__)

_Event = TypeVar("_Event")

_FIRST_PAUSE_S = 0.25  # longest pause before the first retry
_ROUTING_NBYTES = 16
_TIMER_S = 0.001  # a loop's timers are no finer, and one that fires early would fire again and again


class ClientHandler(Protocol):
    """Callbacks of a control client."""

    def on_welcome(self, welcome: Welcome) -> None:
        """The link is up. If this raises, it is made anew; ``on_refused`` follows, or ``on_lost`` on a link that was up."""

    def on_message(self, message: Message) -> None:
        """A message, Status included."""

    def on_lost(self, reason: str) -> None:
        """The link was up and is not any more; the client tries again by itself."""

    def on_refused(self, refused: HelloRefused) -> None:
        """The worker does not talk to us; the client tries again by itself, in case the worker changes."""


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
        network: Network,
        proof: ClientProof | None = None,
    ) -> None:
        """``proof``: who we are, and who the worker must be; without, nothing is encrypted."""
        self.address = address
        self._hello = hello
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._network = network
        self._proof = proof
        self._codec = Codec()
        self._socket: LoopSocket | None = None
        self._is_up = False
        self._heard_s = 0.0  # on the network's clock
        self._end_reason: str | None = None  # why the session ended; None while it goes on
        self._num_unproved = 0  # sessions in a row that ended in the handshake
        self._changed = asyncio.Event()  # the session is up, or at its end
        self._is_wanted = asyncio.Event()  # somebody waits for the link since the last try began
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, on the running loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def is_up(self) -> bool:
        """Whether the worker welcomed us and has not been lost since."""
        return self._is_up

    def hurry(self) -> None:
        """Try again soon, because somebody waits for the link. Otherwise tries become ever rarer."""
        self._is_wanted.set()

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
            self._is_wanted.clear()
            try:
                dealer, watched = self._connecting()
            except zmq.ZMQError as error:  # no descriptor is left at the moment; or the address is none, and stays none
                refused = HelloRefused(code=FailureCode.PEER_LOST, detail=f"cannot connect to {self.address}: {error}")
                self._handle(self._handler.on_refused, refused)
                await self._pause(first_pause_s, pause_s)
                pause_s = min(pause_s * 2, self._settings.reconnect_max_s)
                continue
            monitor = self._network.loop_socket(watched, self._on_event)
            self._socket = self._network.loop_socket(dealer, self._on_frames)
            self._end_reason = None
            self._changed.clear()
            linger_ms = 0
            try:
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
            await self._pause(first_pause_s, pause_s)
            pause_s = min(pause_s * 2, self._settings.reconnect_max_s)

    async def _pause(self, least_s: float, most_s: float) -> None:
        """Wait before the next try. Also a link that is wanted waits ``least_s``, because a worker may refuse every try."""
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._is_wanted.wait()

    def _connecting(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket that is connecting, and its monitor. Raises zmq.ZMQError, and leaves none behind then."""
        dealer = self._network.context.socket(zmq.DEALER)
        try:
            configure_control(dealer, self._settings)
            allow_family(dealer, self.address)
            # Of this connection only, and random: nobody can take it first. ZeroMQ keeps those that begin with a 0.
            dealer.setsockopt(zmq.ROUTING_ID, b"\1" + secrets.token_bytes(_ROUTING_NBYTES))
            if self._proof is not None:
                self._proof.guard(dealer)
            # Before it connects: a handshake that fails is told once, and might be over by then.
            watched = dealer.get_monitor_socket(WATCHED_EVENTS)
            try:
                dealer.connect(self.address)
            except zmq.ZMQError:
                dealer.disable_monitor()
                watched.close(linger=0)
                raise
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        return dealer, watched

    async def _session(self) -> str:
        """Talk until the link breaks; returns why."""
        self._send(self._hello)
        self._heard_s = pinged_s = self._network.clock()
        while self._end_reason is None:
            now_s = self._network.clock()
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

    def _on_event(self, event: list[bytes]) -> None:
        problem = handshake_problem(event, self._proof)
        if problem is not None and self._end_reason is None:
            self._num_unproved += 1
            if self._num_unproved >= (
                1 if self._proof is None else self._proof.num_server_keys
            ):  # else another key may fit
                self._handle(self._handler.on_refused, HelloRefused(code=FailureCode.PEER_LOST, detail=problem))
        self._end(problem or "the connection broke")

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard_s = self._network.clock()
        if self._end_reason is not None:
            return  # messages after the end belong to a session that is over
        try:
            message = self._codec.decode(frames[0] if len(frames) == 1 else b"".join(frames))
        except MalformedMessageError as error:
            self._metrics.refused_messages.labels("malformed").inc()
            logger.warning("dropped a control frame from %s: %s", self.address, error)
            return
        if isinstance(message, HelloRefused):
            if self._is_up:
                self._end(message.detail)  # the worker forgot us, or restarted
            else:
                self._handle(self._handler.on_refused, message)
                self._end(f"refused: {message.detail}")
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif self._is_up:
            self._handle(self._handler.on_message, message)

    def _on_welcome(self, welcome: Welcome) -> None:
        was_up, self._is_up = self._is_up, True
        self._num_unproved = 0
        self._changed.set()
        try:
            self._handler.on_welcome(welcome)
        except Exception as error:
            # Without a new session the link would stay up but useless. Retries slow down, as after a refusal.
            logger.exception("a handler failed on Welcome; the link is made anew")
            detail = f"nothing could be made of its Welcome: {error}"
            if not was_up:
                self._is_up = False
                self._handle(self._handler.on_refused, HelloRefused(code=FailureCode.PEER_LOST, detail=detail))
            self._end(detail)

    def _handle(self, call: Callable[[_Event], None], event: _Event) -> None:
        try:
            call(event)
        except Exception:
            logger.exception("a handler failed on %s; the link goes on", type(event).__name__)
