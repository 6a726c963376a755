"""Which ranks of a worker are on which host. Pure: settings in, places out.

Node 0 has the leader and the first ranks; every other node has as many of the next. So between nodes of whole stages only hidden
states travel. Processes get torchrun's variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.engine.settings import ModelSettings, NodeSettings


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank's position among those of its host."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node of a worker."""

    node_rank: int
    num_nodes: int
    num_ranks: int  # ranks of the worker
    leader: tuple[str, int]  # host and port of node 0, where ranks of the other nodes connect

    @property
    def num_local(self) -> int:
        """Ranks on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node_rank * self.num_local, (self.node_rank + 1) * self.num_local)

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of a rank's process on a node without the leader."""
        local = LocalRank(rank - self.ranks.start, self.num_local)
        return rank_environment(*self.leader, local, self.num_ranks, self.ranks.start) | {
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
        }


@dataclass(frozen=True, slots=True)
class HostDirectories:
    """The directories of a node without the leader, from which its ranks read."""

    model: str
    adapters: str | None = None

    @classmethod
    def of(cls, model: ModelSettings) -> HostDirectories:
        """``model``: the settings that this node was started with."""
        return cls(model.model, model.adapters)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The directories as arguments of a rank's process."""
        return "--model", self.model, *(() if self.adapters is None else ("--adapters", self.adapters))

    def over(self, leaders: ModelSettings) -> ModelSettings:
        """The leader's settings with this node's directories. Raises ModelError if one is missing."""
        if leaders.adapters is None:
            return replace(leaders, model=self.model)
        if self.adapters is None:
            raise ModelError(
                f"the leader has --adapters {leaders.adapters}, and this node none: start all nodes with --adapters, each with "
                "a directory of the same files"
            )
        return replace(leaders, model=self.model, adapters=self.adapters)


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """What a leader must know of the other nodes."""

    place: NodePlace
    secret: bytes = field(repr=False)  # shared with their ranks
    on_leaving: Callable[[str], None]  # called on any thread with a message when a node is asked to end


def place_of(settings: NodeSettings, num_ranks: int) -> NodePlace | None:
    """This process's node in a worker of ``num_ranks``; None if the worker has one node. Raises SettingsError."""
    num_nodes = settings.nodes
    if num_nodes == 1:
        for flag, value in (
            ("--node-rank", settings.node_rank or None), ("--leader-address", settings.leader_address)
        ):  # fmt: skip
            if value is not None:
                raise SettingsError(
                    f"{flag} is {value}, and --nodes is 1: say how many nodes the worker has, or leave it out"
                )
        return None
    if num_ranks % num_nodes:
        fitting = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
        raise SettingsError(
            f"--nodes is {num_nodes}, and a worker has {num_ranks} ranks (--tensor-parallel times --pipeline-parallel), which "
            f"{num_nodes} nodes do not divide: "
            f"take {', '.join(map(str, fitting))} nodes, or another number of ranks"
        )
    if settings.leader_address is None:
        raise SettingsError(f"--nodes is {num_nodes}: --leader-address must say where node 0 hears the others' ranks")
    node_rank, address = settings.node_rank, settings.leader_address
    if settings.node_name is not None:
        name, _, ordinal = settings.node_name.rpartition("-")
        if not ordinal.isdecimal():
            raise SettingsError(f"--node-name is {settings.node_name}; it must end in a number, such as worker-0")
        node_rank = int(ordinal) % num_nodes
        address = address.replace("{leader}", f"{name}-{int(ordinal) - node_rank}")
    if node_rank >= num_nodes:
        raise SettingsError(f"--node-rank is {node_rank}; of {num_nodes} nodes the last is {num_nodes - 1}")
    return NodePlace(node_rank, num_nodes, num_ranks, _host_and_port(address))


def rank_environment(host: str, port: int, local: LocalRank, num_ranks: int, first: int = 0) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(first + local.rank),
        "LOCAL_RANK": str(local.rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(local.num_ranks),
    }


def _host_and_port(address: str) -> tuple[str, int]:
    found = re.fullmatch(r"tcp://(\[[^\[\]]+\]|[^\[\]:{}]+):([0-9]+)", address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise SettingsError(f"--leader-address is {address!r}; it must be tcp://HOST:PORT")
    return found[1].strip("[]"), int(found[2])
