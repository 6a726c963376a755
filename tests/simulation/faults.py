"""The faults that can happen in a world."""

from __future__ import annotations

from collections.abc import Callable

from .ranks import RankedSimEngine
from .threads import SimSender
from .wires import Connection
from .world import World

Fault = Callable[[World], None]


def connections_between(world: World, one: str, other: str) -> list[Connection]:
    """The open connections between two members, by their names."""
    return [
        connection
        for connection in world.wires.connections
        if {connection.client.process.name.partition(".")[0], connection.client.address[6:8]} == {one, other}
    ]


def kill(name: str) -> Fault:
    """SIGKILL."""
    return lambda world: world.kill(name)


def kill_ranks(name: str, *numbers: int) -> Fault:
    """SIGKILL of some ranks of a worker with several ranks. The leader lives on."""
    return _to_ranks(name, lambda ranks: ranks.kill(*numbers))


def hang_ranks(name: str, *numbers: int) -> Fault:
    """SIGSTOP of some ranks of a worker with several ranks."""
    return _to_ranks(name, lambda ranks: ranks.hang(*numbers))


def _to_ranks(name: str, happens: Callable[[RankedSimEngine], None]) -> Fault:
    def fault(world: World) -> None:
        ranks = world.members[name].ranks
        if world.is_up(name) and ranks is not None:
            happens(ranks)

    return fault


def stop(name: str) -> Fault:
    """SIGSTOP."""
    return lambda world: world.members[name].process.stop()


def drain(name: str) -> Fault:
    """SIGTERM."""
    return lambda world: world.drain(name)


def cut(one: str, other: str) -> Fault:
    """The control connection between two members breaks, and both ends notice it."""

    def fault(world: World) -> None:
        for connection in connections_between(world, one, other):
            world.wires.break_off(connection)

    return fault


def freeze(one: str, other: str) -> Fault:
    """The control connection between two members delivers nothing more, and neither end notices it."""

    def fault(world: World) -> None:
        for connection in connections_between(world, one, other):
            world.wires.freeze(connection)

    return fault


def senders_between(world: World, prefill: str, decode: str) -> list[SimSender]:
    """The block senders from a prefill worker to a decode worker, by the workers' names."""
    return [
        sender
        for sender in world.wires.senders
        if (sender.process.name.partition(".")[0], sender.address[6:8]) == (prefill, decode)
    ]


def cut_blocks(prefill: str, decode: str) -> Fault:
    """Only the connection for KV blocks breaks, and the sender notices it."""

    def fault(world: World) -> None:
        for sender in senders_between(world, prefill, decode):
            sender.break_off()

    return fault


def freeze_blocks(prefill: str, decode: str) -> Fault:
    """Only the connection for KV blocks delivers nothing more, and neither end notices it."""

    def fault(world: World) -> None:
        for sender in senders_between(world, prefill, decode):
            sender.freeze()

    return fault


def leave(world: World) -> None:
    """The first client leaves."""
    world.cancel(world.clients[0])
