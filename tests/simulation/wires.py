"""Sockets without a network: what ZeroMQ's sockets, our block sender and receiver do, in virtual time and under a hostile hand.

Between connect and break a connection delivers in order, each message once, after a delay, as TCP does. What is on its way when
it breaks is lost in both directions. A wire may be *hostile* beyond that: it drops, doubles and reorders single messages and
flips bits.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from .clock import Process, SimLoop, current_process

_LONG_DELAY_S = 0.3  # at most, of some messages


@dataclass
class Hostility:
    """Probabilities, by message, of what no TCP does."""

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0  # of a KV block: one bit


@dataclass(eq=False)
class Connection:
    """Between a client's socket and the worker's socket at an address."""

    client: SimSocket
    routing_id: bytes
    server: SimSocket | None = None  # None: nobody has answered yet, or it is broken
    unsent: list[list[bytes]] = field(default_factory=list)
    is_frozen: bool = False  # the network is cut, and nobody has noticed
    frozen: deque[tuple[SimSocket, list[bytes]]] = field(default_factory=deque)
    arrives_s: dict[bool, float] = field(
        default_factory=lambda: {True: 0.0, False: 0.0}
    )  # the last message, by direction
    generation: int = 0  # what is on its way in another one is lost


class Wires:
    """The network of one world."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.hostility = Hostility()
        self.listeners: dict[str, SimSocket] = {}
        self.receivers: dict[str, Any] = {}
        self.senders: list[Any] = []  # of KV blocks, that are not closed
        self.connections: list[Connection] = []
        self.problems: list[str] = []
        self.message_s = 0.004  # at most, of a message …
        self.long_delays = 0.02  # … but of this part
        self.send_s = 0.002  # at most, for each of the two steps of sending a block …
        self.receive_s = 0.003  # … and for receiving it

    def delay_s(self) -> float:
        """Of a message."""
        chance = self.loop.random
        return chance.uniform(0, _LONG_DELAY_S if chance.random() < self.long_delays else self.message_s)

    def listen(self, address: str, socket: SimSocket) -> None:
        """A worker is there; who has waited for it is connected."""
        self.listeners[address] = socket
        for connection in self.connections:
            if connection.server is None and connection.client.address == address:
                self._open(connection)

    def connect(self, socket: SimSocket, address: str) -> None:
        """A client wants to be connected."""
        socket.address = address
        connection = socket.connection = Connection(socket, socket.routing_id)
        self.connections.append(connection)
        if address in self.listeners:
            self._open(connection)

    def _open(self, connection: Connection) -> None:
        connection.server = self.listeners[connection.client.address]
        connection.server.routes[connection.routing_id] = connection
        unsent, connection.unsent = connection.unsent, []
        for frames in unsent:
            self.send(connection, frames, to_server=True)

    def send(self, connection: Connection, frames: list[bytes], *, to_server: bool) -> None:
        """One message on its way."""
        if connection.server is None:
            connection.unsent.append(frames)
            return
        target, hostility, chance = (
            connection.server if to_server else connection.client,
            self.hostility,
            self.loop.random,
        )
        message = [connection.routing_id, *frames] if to_server else frames
        if chance.random() < hostility.drop:
            return
        for _ in range(2 if chance.random() < hostility.double else 1):
            if connection.is_frozen:
                connection.frozen.append((target, message))
                continue
            arrives_s = self.loop.now_s + self.delay_s()
            if chance.random() >= hostility.reorder:
                arrives_s = connection.arrives_s[to_server] = max(arrives_s, connection.arrives_s[to_server] + 1e-9)
            self._deliver_at(arrives_s, connection, target, message)

    def _deliver_at(self, when_s: float, connection: Connection, target: SimSocket, message: list[bytes]) -> None:
        generation = connection.generation

        def deliver() -> None:
            if connection.is_frozen:
                connection.frozen.append((target, message))
            elif connection.generation == generation and not target.closed and target.on_message is not None:
                target.on_message(message)

        self.loop.call_at(when_s, deliver, context=target.process.context)

    def break_off(self, connection: Connection) -> None:
        """The connection is gone, both ends hear of it soon, and what was on its way is lost."""
        connection.generation += 1
        connection.frozen.clear()
        connection.is_frozen = False
        server, connection.server = connection.server, None
        if server is not None and server.routes.get(connection.routing_id) is connection:
            del server.routes[connection.routing_id]
        client = connection.client
        if connection in self.connections:
            self.connections.remove(connection)
        if server is not None and not client.closed:
            self.loop.call_at(self.loop.now_s + self.delay_s(), client.tell_broken, context=client.process.context)

    def freeze(self, connection: Connection) -> None:
        """Nothing gets through, and nobody hears of it."""
        connection.is_frozen = True

    def thaw(self, connection: Connection) -> None:
        """What was held up arrives."""
        connection.is_frozen = False
        held, connection.frozen = list(connection.frozen), deque()
        for target, message in held:
            self._deliver_at(self.loop.now_s + 0.001, connection, target, message)

    def end_receiver(self, address: str) -> None:
        """Nobody takes KV blocks there any more, and who sends some hears of it."""
        del self.receivers[address]
        for sender in self.senders:
            if sender.address == address:
                sender.on_peer_gone()

    def on_killed(self, process: Process) -> None:
        """The kernel closes what a process had open."""
        for address, socket in list(self.listeners.items()):
            if socket.process is process:
                del self.listeners[address]
        for address, receiver in list(self.receivers.items()):
            if receiver.process is process:
                self.end_receiver(address)
        self.senders = [sender for sender in self.senders if sender.process is not process]
        for connection in list(self.connections):
            if process in (connection.client.process, connection.server and connection.server.process):
                self.break_off(connection)


class SimContext:
    """For ``zmq.Context``: of the process that makes a socket."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires

    def socket(self, kind: int) -> SimSocket:
        """For ``Context.socket``."""
        return SimSocket(self.wires, current_process(), kind)

    def term(self) -> None:
        """Nothing to wait for."""


class SimSocket:
    """For ``zmq.Socket``, as far as control links use one; see :class:`SimLoopSocket` for what it receives."""

    def __init__(self, wires: Wires, process: Process, kind: int) -> None:
        self.wires, self.process, self.kind = wires, process, kind
        self.closed = False
        self.address = ""
        self.routing_id = b""
        self.connection: Connection | None = None
        self.routes: dict[bytes, Connection] = {}  # of a ROUTER
        self.on_message: Callable[[list[bytes]], None] | None = None
        self.monitor: SimSocket | None = None

    def setsockopt(self, option: int, value: Any) -> None:
        """Only the routing id matters here."""
        if option == zmq.ROUTING_ID:
            self.routing_id = value

    def getsockopt_string(self, _option: int) -> str:
        """The endpoint."""
        return self.address

    def bind(self, address: str) -> None:
        """Listen."""
        self.address = address
        self.wires.listen(address, self)

    def connect(self, address: str) -> None:
        """Connect, now or when somebody listens."""
        self.wires.connect(self, address)

    def get_monitor_socket(self, _events: int) -> SimSocket:
        """Where breaks are told."""
        self.monitor = SimSocket(self.wires, self.process, zmq.PAIR)
        return self.monitor

    def disable_monitor(self) -> None:
        """No more of it."""
        self.monitor = None

    def tell_broken(self) -> None:
        """The connection broke."""
        if self.monitor is not None and self.monitor.on_message is not None:
            self.monitor.on_message([struct.pack("=hi", zmq.EVENT_DISCONNECTED, 0), b""])

    def send(self, frames: Sequence[bytes]) -> bool:
        """A ROUTER's first frame says to whom; False if there is no such peer."""
        if self.closed:
            return False
        if self.kind == zmq.ROUTER:
            connection = self.routes.get(frames[0])
            if connection is None:
                return False
            self.wires.send(connection, list(frames[1:]), to_server=False)
        elif self.connection is not None:
            self.wires.send(self.connection, list(frames), to_server=True)
        return True

    def close(self) -> None:
        """Gone; what was sent before still arrives, what comes is lost."""
        self.closed = True
        if self.kind == zmq.ROUTER and self.wires.listeners.get(self.address) is self:
            del self.wires.listeners[self.address]
            for connection in list(self.routes.values()):
                self.wires.break_off(connection)
        if self.connection is not None and self.connection in self.wires.connections:
            self.wires.connections.remove(self.connection)


class SimLoopSocket:
    """For :class:`kvrelay.wire.loop_socket.LoopSocket`."""

    def __init__(
        self, socket: SimSocket, on_message: Callable[[list[bytes]], None], receive: Callable[..., Any] | None = None
    ) -> None:
        assert receive is None, "keys are not simulated"
        self._socket = socket
        self._on_message = on_message
        self.is_alive = False

    def start(self) -> None:
        """Begin to receive."""
        self._socket.on_message = self._on_message
        self.is_alive = True

    def send(self, frames: Sequence[bytes]) -> bool:
        """See LoopSocket."""
        return self._socket.send(frames)

    def close(self, linger_ms: int) -> None:
        """See LoopSocket."""
        self.is_alive = False
        self._socket.close()
