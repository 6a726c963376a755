"""The ranks of one engine under ``torch.distributed``, by torchrun's conventions.

There is one group in a process, as torch has one default group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from kvrelay.engine.config.cut import Cut

_HOST = "127.0.0.1"
# Ranks come to each collective at about the same time. Who dies or stops is noticed by its link, much sooner.
_TIMEOUT = timedelta(seconds=30)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Meeting:
    """Where the ranks of one host find each other. The leader opens it; ``environment`` tells the others."""

    def __init__(self, store: Store, port: int, cut: Cut) -> None:
        self.cut = cut  # of the rank that is here
        self._store = store
        self._port = port

    @classmethod
    def open(cls, num_ranks: int) -> Meeting:
        """The leader's. Listens on loopback."""
        with socket.create_server((_HOST, 0)) as listening:
            port: int = listening.getsockname()[1]
            # The store's own socket would listen on every address.
            store = TCPStore(
                _HOST, port, num_ranks, is_master=True, timeout=_TIMEOUT, wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        return cls(store, port, Cut(0, num_ranks))

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Meeting:
        """The one that a rank's environment names. Raises RuntimeError if nobody is there."""
        cut, port = Cut(int(environment["RANK"]), int(environment["WORLD_SIZE"])), int(environment["MASTER_PORT"])
        return cls(TCPStore(environment["MASTER_ADDR"], port, cut.num_ranks, timeout=_TIMEOUT), port, cut)

    def environment(self, rank: int) -> dict[str, str]:
        """Of a rank's process."""
        return {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.cut.num_ranks),
        }

    def join(self, device: torch.device) -> RankGroup:
        """This rank's place in the group; waits until all have joined. Raises RuntimeError if one does not.

        ``device``: of this rank's tensors. A GPU is the calling thread's own from now on, one for each rank.
        """
        if device.type == "cuda":
            device = torch.device("cuda", self.cut.rank)
            torch.cuda.set_device(device)
        return RankGroup(self._store, self.cut, device)


class RankGroup:
    """Implements :class:`kvrelay.engine.models.ranks.Collectives`. One thread at a time."""

    def __init__(self, store: Store, cut: Cut, device: torch.device) -> None:
        """See Meeting.join."""
        for backend in ("GLOO", "NCCL"):  # else an address of the host, for ranks that are all on it
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            _BACKENDS[device.type], store=store, rank=cut.rank, world_size=cut.num_ranks, timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        self._device = device
        self._num_ranks = cut.num_ranks
        self.num_meetings = 0  # collectives that this rank has entered; any thread may look

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.num_meetings += 1
        dist.all_reduce(partial)
        return partial

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See Collectives."""
        self.num_meetings += 1
        parts = [torch.empty_like(part) for _ in range(self._num_ranks)]
        dist.all_gather(parts, part)
        return parts

    def least(self, number: int) -> int:
        """See Collectives."""
        self.num_meetings += 1
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def close(self) -> None:
        """Leave the group; the others cannot go on."""
        dist.destroy_process_group()
