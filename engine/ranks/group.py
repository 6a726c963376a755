"""The ranks of one engine under ``torch.distributed``, with torchrun's conventions.

A process has one group, because torch has one default group.
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
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.ranks.messages import TOGETHER_S
from kvrelay.engine.ranks.nodes import LocalRank, rank_environment

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
# Ranks reach each collective at about the same time. Their links notice a dead or stopped rank much sooner.
_TIMEOUT = timedelta(seconds=TOGETHER_S)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Meeting:
    """The ranks' meeting point. The leader opens it; ``environment`` describes it to the others on its host."""

    def __init__(self, store: Store, host: str, port: int, rank: int, num_ranks: int, local: LocalRank) -> None:
        self.rank = rank  # this process's rank
        self.num_ranks = num_ranks  # in all
        self.local = local
        self.port = port
        self._store = store
        self._host = host

    @classmethod
    def open(cls, num_ranks: int, num_local: int, host: str = "127.0.0.1") -> Meeting:
        """Open the meeting as leader, listening on ``host``, an address of this machine. ``num_local``: ranks on this host."""
        with socket.create_server((host, 0), family=_family(host)) as listening:
            port: int = listening.getsockname()[1]
            # A socket made by the store itself would listen on every address.
            store = TCPStore(
                host, port, num_ranks, is_master=True, timeout=_TIMEOUT, wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        return cls(store, host, port, 0, num_ranks, LocalRank(0, num_local))

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Meeting:
        """The meeting that a rank's environment describes. Raises RuntimeError if it does not exist."""
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = LocalRank(int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]))
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return cls(TCPStore(host, port, num_ranks, timeout=_TIMEOUT), host, port, rank, num_ranks, local)

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of a rank's process on the leader's host."""
        return rank_environment(self._host, self.port, LocalRank(rank, self.local.num_ranks), self.num_ranks)

    def join(self, device: torch.device, cut: Cut) -> RankGroup:
        """Join the group; waits until all ranks have joined. Raises RuntimeError if one does not.

        ``cut``: this rank's part of the model. ``device``: of its tensors. A GPU becomes the calling thread's current one; each
        rank of a host has its own.
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

    The ranks of a stage are a group, and so are two ranks of neighbouring stages. With NCCL each group has its own stream, so that
    sends do not wait for receives.
    """

    def __init__(self, store: Store, cut: Cut, device: torch.device, interface: str | None) -> None:
        """See Meeting.join. ``interface``: the network interface towards the others; None: gloo's and NCCL's own choice."""
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
        self._sends: deque[dist.Work] = deque()  # sends that may not be over
        if cut.num_stages > 1:
            try:
                self._open_stages()
            except BaseException:  # a process has one group at a time, and may load again
                self.close()
                raise
        self.num_meetings = 0  # number of collectives that this rank has entered; any thread may read it

    def _open_stages(self) -> None:
        """Open the groups between stages. All ranks must call this."""
        cut, own = self._cut, self._cut.number
        for stage in range(cut.num_stages if cut.num_ranks > 1 else 0):
            ranks = range(stage * cut.num_ranks, (stage + 1) * cut.num_ranks)
            group = dist.new_group(list(ranks), timeout=_TIMEOUT)
            self._stage = group if own in ranks else self._stage
        for first in range((cut.num_stages - 1) * cut.num_ranks):
            # With the first step, the last stage waits for all stages before it.
            group = dist.new_group([first, first + cut.num_ranks], timeout=_TIMEOUT * cut.num_stages)
            if own == first:
                self._behind = group
            elif own == first + cut.num_ranks:
                self._in_front = group

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See Collectives. On a CPU a number has the same bits wherever it is in ``partial``.

        gloo begins each part of a sum at another rank. With three ranks or more a token's sums would then depend on its row.
        """
        if self._device.type == "cpu" and self._cut.num_ranks > 2:
            first, second, *others = self.gather(partial)
            torch.add(first, second, out=partial)
            for one in others:
                partial += one
            return partial
        self.num_meetings += 1
        dist.all_reduce(partial, group=self._stage)
        return partial

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See Collectives."""
        self.num_meetings += 1
        parts = [torch.empty_like(part) for _ in range(self._cut.num_ranks)]
        dist.all_gather(parts, part, group=self._stage)
        return parts

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.num_meetings += 1
        dist.broadcast(tensor, group=self._stage, group_src=0)
        return tensor

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
        """See StageLine. Raises RuntimeError if an earlier send failed."""
        self.num_meetings += 1
        # There are never more steps under way than stages, so the oldest send is over, or about to be.
        if len(self._sends) == self._cut.num_stages:
            self._sends.popleft().wait()
        work = dist.isend(hidden, group=self._behind, group_dst=1)
        assert work is not None, "this rank is in the group"
        self._sends.append(work)

    def close(self) -> None:
        """Leave the group; the others cannot continue."""
        dist.destroy_process_group()


def _interface_towards(host: str) -> str | None:
    """The network interface that reaches ``host``, an address; None if it cannot be found."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting a datagram socket sends nothing
        own = ipaddress.ip_address(probe.getsockname()[0])
        if own.is_loopback:
            return "lo"
        if own.version == 6:
            rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
            return next((name for address, *_, name in rows if bytes.fromhex(address) == own.packed), None)
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
            if answer[20:24] == own.packed:
                return name
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
