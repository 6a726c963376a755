"""The faults that can happen in a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from .ranks import RankedSimEngine
from .threads import SimSender
from .wires import Connection
from .world import World

T = TypeVar("T")

Fault = Callable[[World], bool]
"""Returns whether there was anything to strike."""


def strike(world: World, moment: int, fault: Fault) -> list[bool]:
    """Let ``fault`` happen right before event ``moment``. Its result is then in the list."""
    struck: list[bool] = []
    world.loop.triggers[moment] = lambda: struck.append(fault(world))
    return struck


def moments_of(world: World, ask: Callable[[World], object]) -> range:
    """The numbers of the events from ``ask`` until all requests have an outcome."""
    first = world.loop.num_events + 1
    ask(world)
    assert world.until(world.are_over)
    return range(first, world.loop.num_events + 1)


def kill(name: str) -> Fault:
    """SIGKILL."""
    return _to_member(name, World.kill)


def stop(name: str) -> Fault:
    """SIGSTOP."""
    return _to_member(name, lambda world, name: world.members[name].process.stop())


def drain(name: str) -> Fault:
    """SIGTERM."""
    return _to_member(name, World.drain)


def kill_ranks(name: str, *numbers: int) -> Fault:
    """SIGKILL of some ranks of a worker with several ranks. The leader lives on."""
    return _to_member(name, lambda world, name: _ranks_of(world, name).kill(*numbers))


def hang_ranks(name: str, *numbers: int) -> Fault:
    """SIGSTOP of some ranks of a worker with several ranks."""
    return _to_member(name, lambda world, name: _ranks_of(world, name).hang(*numbers))


def cut(one: str, other: str) -> Fault:
    """The control connection between two members breaks, and both ends notice it."""
    return _to_each(_connections(one, other), lambda world, connection: world.wires.break_off(connection))


def freeze(one: str, other: str) -> Fault:
    """The control connection between two members delivers nothing more, and neither end notices it."""
    return _to_each(_connections(one, other), lambda world, connection: world.wires.freeze(connection))


def cut_blocks(prefill: str, decode: str) -> Fault:
    """Only the connection for KV blocks breaks, and the sender notices it."""
    return _to_each(_senders(prefill, decode), lambda _, sender: sender.break_off())


def freeze_blocks(prefill: str, decode: str) -> Fault:
    """Only the connection for KV blocks delivers nothing more, and neither end notices it."""
    return _to_each(_senders(prefill, decode), lambda _, sender: sender.freeze())


def cut_all_blocks(world: World) -> bool:
    """All connections for KV blocks break."""
    return _to_each(lambda world: list(world.wires.senders), lambda _, sender: sender.break_off())(world)


def leave(world: World) -> bool:
    """The first client leaves."""
    world.clients[0].leave()
    return True


def _connections(one: str, other: str) -> Callable[[World], list[Connection]]:
    return lambda world: [
        connection
        for connection in world.wires.connections
        if (connection.client.process.member, connection.client.address[6:8]) == (one, other)
    ]


def _senders(prefill: str, decode: str) -> Callable[[World], list[SimSender]]:
    return lambda world: [
        sender for sender in world.wires.senders if (sender.process.member, sender.address[6:8]) == (prefill, decode)
    ]


def _ranks_of(world: World, name: str) -> RankedSimEngine:
    ranks = world.members[name].ranks
    assert ranks is not None, f"{name} has no ranks"
    return ranks


def _to_member(name: str, happens: Callable[[World, str], None]) -> Fault:
    return _to_each(lambda world: [name] if world.is_up(name) else [], happens)


def _to_each(found: Callable[[World], Iterable[T]], happens: Callable[[World, T], None]) -> Fault:
    def fault(world: World) -> bool:
        victims = list(found(world))
        for victim in victims:
            happens(world, victim)
        return bool(victims)

    return fault
