"""What can go wrong in a world, by name."""

from __future__ import annotations

from collections.abc import Callable

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


def stop(name: str) -> Fault:
    """SIGSTOP."""
    return lambda world: world.members[name].process.stop()


def drain(name: str) -> Fault:
    """SIGTERM."""
    return lambda world: world.drain(name)


def cut(one: str, other: str) -> Fault:
    """A connection breaks, and both ends hear of it."""

    def fault(world: World) -> None:
        for connection in connections_between(world, one, other):
            world.wires.break_off(connection)

    return fault


def freeze(one: str, other: str) -> Fault:
    """Nothing gets through any more, and nobody hears of it."""

    def fault(world: World) -> None:
        for connection in connections_between(world, one, other):
            world.wires.freeze(connection)

    return fault


def leave(world: World) -> None:
    """The first client leaves."""
    world.cancel(world.clients[0])
