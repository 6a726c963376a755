"""The leader's end of a rank on its own host: a process that it starts, and whose memory it shares."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

import torch

from kvrelay.engine.kv.gathered import HostPart, Part
from kvrelay.engine.ranks.blocks import BlocksOfRank, Moved, shared_bytes
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import FromRank
from kvrelay.engine.ranks.rank import Rank
from kvrelay.engine.ranks.start import end, how_it_ended, start_rank


class RankProcess(Rank):
    """A rank on the leader's host."""

    def __init__(self, rank: int, environment: Mapping[str, str], on_lost: Callable[[Rank], None]) -> None:
        """Starts the process. ``environment``: see Meeting."""
        # Memory for its KV pool, which the leader reads and writes. With a pool on a GPU: for one block, sent through
        # ``blocks``.
        self._pool_memory = os.memfd_create(f"kvrelay-kv-{rank}")
        (ours, theirs), (our_blocks, their_blocks) = socket.socketpair(), socket.socketpair()
        with theirs, their_blocks:
            descriptors = (theirs.fileno(), their_blocks.fileno(), self._pool_memory)
            self._process = start_rank(environment, descriptors)
        link: Link[FromRank] = Link(ours, FromRank)
        self._blocks: Link[Moved] = Link(our_blocks, Moved)
        # Its host is the leader's, so ``on_leaving`` is not needed.
        super().__init__(rank, f"process {self.pid}", link, on_lost, lambda _: None)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """See Rank."""
        self._process.kill()

    def part(self, device: torch.device, num_blocks: int, block_nbytes: int) -> Part:
        """See Rank."""
        if device.type == "cuda":
            return BlocksOfRank(self._blocks, self._pool_memory, block_nbytes)
        return HostPart(shared_bytes(self._pool_memory, num_blocks * block_nbytes).reshape(num_blocks, block_nbytes))

    def _end(self) -> None:
        self._blocks.shut()
        end(self._process)
        self._blocks.close()
        os.close(self._pool_memory)

    def _how_it_ended(self, reason: EOFError) -> str:
        return how_it_ended(self._process)
