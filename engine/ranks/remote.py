"""The leader's end of a rank on another host: two links over TCP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from kvrelay.engine.kv.gathered import Part
from kvrelay.engine.ranks.carried import CarriedBlocks, Moved
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import ALIVE_S, Alive, FromRank, Hello
from kvrelay.engine.ranks.rank import Rank


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rank that has connected, before it gets any message."""

    hello: Hello
    link: Link[Any]
    blocks: Link[Any]

    @property
    def is_over(self) -> bool:
        """Whether it has left again."""
        return self.link.is_over(0) or self.blocks.is_over(0)

    def close(self) -> None:
        """Send it away."""
        for link in (self.link, self.blocks):
            link.shut()
            link.close()


class RemoteRank(Rank):
    """A rank on another host. It ends when its links do."""

    def __init__(self, arrived: Arrived, on_lost: Callable[[Rank], None], on_leaving: Callable[[str], None]) -> None:
        """Takes over the links, and starts sending signs of life."""
        self._blocks: Link[Moved] = arrived.blocks.then(Moved)
        super().__init__(arrived.hello.rank, arrived.hello.place, arrived.link.then(FromRank), on_lost, on_leaving)
        self._pulse = threading.Thread(target=self._beat, name=f"rank-{self.rank}-pulse", daemon=True)
        self._pulse.start()

    @property
    def own_host(self) -> str:
        """The address of this machine that the rank has reached."""
        return self._link.own_host

    def kill(self) -> None:
        """See Rank. If it hangs, its host kills it."""
        self._link.shut()
        self._blocks.shut()

    def part(self, device: torch.device, num_blocks: int, block_nbytes: int) -> Part:
        """See Rank."""
        return CarriedBlocks(self._blocks, block_nbytes)

    def _end(self) -> None:
        self._blocks.shut()
        self._pulse.join()
        self._blocks.close()

    def _how_it_ended(self, reason: EOFError) -> str:
        return f"is gone, with its process, its host or the network: {reason}"

    def _beat(self) -> None:
        alive = msgspec.msgpack.encode(Alive(0))
        while not self._closing.wait(ALIVE_S):
            try:
                self._blocks.send_encoded(alive)
            except OSError:
                return
