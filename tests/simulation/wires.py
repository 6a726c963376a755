"""A simulated network for control links, in virtual time: sockets that behave as ZeroMQ's do, without a real network.

A connection delivers each message once, in order, after a delay, as TCP does. A connection that breaks loses the messages on their
way in both directions. A *hostile* network also drops, doubles and reorders single messages, and flips bits of KV blocks.
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
    """Probabilities, for each message, of faults that TCP prevents."""

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0  # of a KV block: one bit


@dataclass(eq=False)
class Connection:
    """A connection between a client's socket and the worker's socket at an address."""

    client: SimSocket
    routing_id: bytes
    server: SimSocket | None = None  # None: no worker listens yet, or the connection is broken
    unsent: list[list[bytes]] = field(default_factory=list)
    is_frozen: bool = False  # nothing gets through, and neither end has noticed
    frozen: deque[tuple[SimSocket, list[bytes]]] = field(default_factory=deque)
    arrives_s: dict[bool, float] = field(
        default_factory=lambda: {True: 0.0, False: 0.0}
    )  # arrival of the last message, by direction
    generation: int = 0  # messages on their way in an earlier generation are lost


class Wires:
    """The network of one world."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.hostility = Hostility()
        self.listeners: dict[str, SimSocket] = {}
        self.receivers: dict[str, Any] = {}
        self.senders: list[Any] = []  # open senders of KV blocks
        self.connections: list[Connection] = []
        self.message_s = 0.004  # longest delay of a message …
        self.long_delays = 0.02  # … but for this share of messages
        self.send_s = 0.002  # longest time of each of the two steps of sending a block
        self.receive_s = 0.003  # longest time of receiving a block

    def delay_s(self) -> float:
        """A random delay of a message."""
        chance = self.loop.random
        return chance.uniform(0, _LONG_DELAY_S if chance.random() < self.long_delays else self.message_s)

    def listen(self, address: str, socket: SimSocket) -> None:
        """A worker's socket listens; clients that wait for this address are connected."""
        self.listeners[address] = socket
        for connection in self.connections:
            if connection.server is None and connection.client.address == address:
                self._open(connection)

    def connect(self, socket: SimSocket, address: str) -> None:
        """Connect a client, now or when a worker listens at the address."""
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
        """Put one message on its way."""
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
        """The connection breaks, and messages on their way are lost. Both ends are told soon."""
        connection.generation += 1
        connection.frozen.clear()
        connection.is_frozen = False
        server, connection.server = connection.server, None
        if server is not None and server.routes.get(connection.routing_id) is connection:
            del server.routes[connection.routing_id]
        client = connection.client
        if connection in self.connections:
            self.connections.remove(connection)
        for end in () if server is None else (client, server):
            if not end.closed:
                self.loop.call_at(self.loop.now_s + self.delay_s(), end.tell_broken, context=end.process.context)

    def close(self, connection: Connection) -> None:
        """The client closes its end. The server forgets it once all messages of the client have arrived."""
        if connection in self.connections:
            self.connections.remove(connection)
        server = connection.server
        if server is not None and not connection.is_frozen:
            arrives_s = max(self.loop.now_s, connection.arrives_s[True]) + 1e-9
            self.loop.call_at(arrives_s, server.routes.pop, connection.routing_id, None, context=server.process.context)

    def freeze(self, connection: Connection) -> None:
        """Nothing gets through, and neither end notices it."""
        connection.is_frozen = True

    def thaw(self, connection: Connection) -> None:
        """Held messages arrive."""
        connection.is_frozen = False
        held, connection.frozen = list(connection.frozen), deque()
        for target, message in held:
            self._deliver_at(self.loop.now_s + 0.001, connection, target, message)

    def end_receiver(self, address: str) -> None:
        """The receiver of KV blocks at this address ends, and its senders notice it."""
        del self.receivers[address]
        for sender in self.senders:
            if sender.address == address:
                sender.on_peer_gone()

    def on_killed(self, process: Process) -> None:
        """Close all sockets of a killed process, as the kernel does."""
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
    """Stands in for ``zmq.Context``. A socket belongs to the process that makes it."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires

    def socket(self, kind: int) -> SimSocket:
        """See ``Context.socket``."""
        return SimSocket(self.wires, current_process(), kind)

    def term(self) -> None:
        """Nothing to do."""


class SimSocket:
    """Stands in for ``zmq.Socket``, as far as control links use one. :class:`SimLoopSocket` receives."""

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
        """Set the routing id; other options have no effect."""
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
        """Connect, now or when a worker listens."""
        self.wires.connect(self, address)

    def get_monitor_socket(self, _events: int) -> SimSocket:
        """The socket that reports breaks of the connection."""
        self.monitor = SimSocket(self.wires, self.process, zmq.PAIR)
        return self.monitor

    def disable_monitor(self) -> None:
        """Report no more breaks."""
        self.monitor = None

    def tell_broken(self) -> None:
        """Report that the connection broke."""
        if self.monitor is not None and self.monitor.on_message is not None:
            self.monitor.on_message([struct.pack("=hi", zmq.EVENT_DISCONNECTED, 0), b""])

    def send(self, frames: Sequence[bytes]) -> bool:
        """A ROUTER's first frame is the peer's routing id. Returns False if there is no such peer."""
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
        """Close the socket. Messages it has sent still arrive; messages to it are lost."""
        self.closed = True
        if self.kind == zmq.ROUTER and self.wires.listeners.get(self.address) is self:
            del self.wires.listeners[self.address]
            for connection in list(self.routes.values()):
                self.wires.break_off(connection)
        if self.connection is not None:
            self.wires.close(self.connection)


class SimLoopSocket:
    """Stands in for :class:`kvrelay.wire.loop_socket.LoopSocket`."""

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
