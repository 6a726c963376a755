"""The ranks of one engine under ``torch.distributed``, by torchrun's conventions.

There is one group in a process, as torch has one default group.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.ranks.messages import TOGETHER_S
from kvrelay.engine.ranks.nodes import LocalRank, rank_environment

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
# Ranks come to each collective at about the same time. Who dies or stops is noticed by its link, much sooner.
_TIMEOUT = timedelta(seconds=TOGETHER_S)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Meeting:
    """Where the ranks find each other. The leader opens it; ``environment`` tells the others on its host."""

    def __init__(self, store: Store, host: str, port: int, rank: int, num_ranks: int, local: LocalRank) -> None:
        self.rank = rank  # that is here
        self.num_ranks = num_ranks  # in all
        self.local = local
        self.port = port
        self._store = store
        self._host = host

    @classmethod
    def open(cls, num_ranks: int, num_local: int | None = None, host: str = "127.0.0.1") -> Meeting:
        """The leader's. Listens on ``host``, an address of this machine. ``num_local``: how many ranks are on it; None: all."""
        with socket.create_server((host, 0), family=_family(host)) as listening:
            port: int = listening.getsockname()[1]
            # The store's own socket would listen on every address.
            store = TCPStore(
                host, port, num_ranks, is_master=True, timeout=_TIMEOUT, wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        return cls(store, host, port, 0, num_ranks, LocalRank(0, num_local or num_ranks))

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Meeting:
        """The one that a rank's environment names. Raises RuntimeError if nobody is there."""
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = LocalRank(int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]))
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return cls(TCPStore(host, port, num_ranks, timeout=_TIMEOUT), host, port, rank, num_ranks, local)

    def environment(self, rank: int) -> dict[str, str]:
        """Of a process on the leader's host."""
        return rank_environment(self._host, self.port, LocalRank(rank, self.local.num_ranks), self.num_ranks)

    def join(self, device: torch.device, cut: Cut) -> RankGroup:
        """This rank's place in the group; waits until all have joined. Raises RuntimeError if one does not.

        ``cut``: its part of the model.
        ``device``: of this rank's tensors. A GPU is the calling thread's own from now on, one for each rank of a host.
        """
        if device.type == "cuda":
            device = torch.device("cuda", self.local.rank)
            torch.cuda.set_device(device)
        assert (cut.number, cut.num_ranks * cut.num_stages) == (self.rank, self.num_ranks), (
            f"{cut} of {self.num_ranks} ranks"
        )
        return RankGroup(self._store, cut, device, _interface_towards(self._host))


class RankGroup:
    """Implements :class:`kvrelay.engine.models.ranks.Collectives` and ``StageLine``. One thread at a time.

    Ranks of a stage are a group, and so are two ranks of neighbouring stages: with NCCL each has a stream of its own, so that what
    is sent waits for nothing that comes.
    """

    def __init__(self, store: Store, cut: Cut, device: torch.device, interface: str | None) -> None:
        """See Meeting.join. ``interface``: the network's that leads to the others; None: as gloo and NCCL choose."""
        for backend in ("GLOO", "NCCL"):
            if interface is not None:
                os.environ.setdefault(f"{backend}_SOCKET_IFNAME", interface)
        dist.init_process_group(
            _BACKENDS[device.type], store=store, rank=cut.number, world_size=cut.num_ranks * cut.num_stages, timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        self._device = device
        self._cut = cut
        self._stage: dist.ProcessGroup | None = None  # None: all ranks
        self._in_front: dist.ProcessGroup | None = None
        self._behind: dist.ProcessGroup | None = None
        self._sends: deque[dist.Work] = deque()  # that may not be over
        if cut.num_stages > 1:
            self._open_stages()
        self.num_meetings = 0  # collectives that this rank has entered; any thread may look

    def _open_stages(self) -> None:
        """All ranks call this."""
        cut, own = self._cut, self._cut.number
        for stage in range(cut.num_stages if cut.num_ranks > 1 else 0):
            ranks = range(stage * cut.num_ranks, (stage + 1) * cut.num_ranks)
            group = dist.new_group(list(ranks), timeout=_TIMEOUT)
            self._stage = group if own in ranks else self._stage
        for first in range((cut.num_stages - 1) * cut.num_ranks):
            # The last of several stages waits for all that are in front, with the first step.
            group = dist.new_group([first, first + cut.num_ranks], timeout=_TIMEOUT * cut.num_stages)
            if own == first:
                self._behind = group
            elif own == first + cut.num_ranks:
                self._in_front = group

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.num_meetings += 1
        dist.all_reduce(partial, group=self._stage)
        return partial

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See Collectives."""
        self.num_meetings += 1
        parts = [torch.empty_like(part) for _ in range(self._cut.num_ranks)]
        dist.all_gather(parts, part, group=self._stage)
        return parts

    def least(self, number: int) -> int:
        """See Collectives."""
        self.num_meetings += 1
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """See StageLine."""
        self.num_meetings += 1
        dist.recv(hidden, group=self._in_front, group_src=0)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """See StageLine. Raises RuntimeError if an earlier one did not arrive."""
        self.num_meetings += 1
        # There are never more steps under way than stages: so many sends ago is over, or about to be.
        if len(self._sends) == self._cut.num_stages:
            self._sends.popleft().wait()
        work = dist.isend(hidden, group=self._behind, group_dst=1)
        assert work is not None, "this rank is in the group"
        self._sends.append(work)

    def close(self) -> None:
        """Leave the group; the others cannot go on."""
        dist.destroy_process_group()


def _interface_towards(host: str) -> str | None:
    """The network interface that ``host``, an address, is reached by; None: nobody knows, as with IPv6."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = ipaddress.ip_address(probe.getsockname()[0])
        if own.is_loopback:
            return "lo"
        for _, name in socket.if_nameindex() if own.version == 4 else ():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if answer[20:24] == own.packed:
                return name
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
