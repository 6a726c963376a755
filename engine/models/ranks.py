"""A rank's part of a model: products that are summed over ranks, and a vocabulary that is split among ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.ops import Linear


class Collectives(Protocol):
    """Operations of all ranks of a stage together.

    Every rank calls the same ones in the same order, with tensors of the same shape.
    """

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place, with the same bits on every rank."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``part``, in the order of ranks."""

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill ``tensor`` with what the first rank has in it."""

    def least(self, number: int) -> int:
        """The smallest number of all ranks of all stages; waits for them."""


class StageLine(Protocol):
    """A rank's links to its counterparts in the stage before and the next one. Both get the same steps in the same order."""

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill ``hidden`` with what the stage before has sent; waits for it."""

    def send(self, hidden: torch.Tensor) -> None:
        """Send to the next stage without waiting. Do not change ``hidden`` afterwards."""


class Meet(Protocol):
    """Where ranks wait for each other while they load, however long that takes; collectives wait only for seconds."""

    def __call__(self, told: bytes = b"") -> bytes:
        """Wait until all ranks are here. Returns on each rank what the leader has ``told``.

        Raises ModelError if a rank does not come.
        """


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that this process computes, and its links to the other ranks."""

    cut: Cut
    collectives: Collectives
    meet: Meet
    num_local: int  # number of ranks on this host, which share its cores
    pool_memory: int | None = None  # descriptor of memory for its KV pool, shared with the leader; None: own memory
    line: StageLine | None = None  # only with several stages

    @property
    def is_leader(self) -> bool:
        """Whether this is the leader's process."""
        return self.cut.number == 0


def summed(linear: Linear, part: RankPart | None) -> Linear:
    """The product over all ranks' inputs; ``linear`` is this rank's part."""
    if part is None or part.cut.num_ranks == 1:
        return linear
    collectives = part.collectives
    return lambda hidden: collectives.sum(linear(hidden))


def embedding(weight: torch.Tensor, vocab_size: int, part: RankPart | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids ``[n]`` -> ``[n, hidden]`` in new memory. ``weight``: this rank's rows."""
    if part is None or part.cut.num_ranks == 1:
        return lambda token_ids: F.embedding(token_ids, weight)
    first, collectives = part.cut.vocab(vocab_size).start, part.collectives

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        own = token_ids - first
        is_other = (own < 0) | (own >= len(weight))
        rows = F.embedding(own.masked_fill_(is_other, 0), weight)
        return collectives.sum(rows.masked_fill_(is_other[:, None], 0))

    return embed


def gathered(linear: Linear, vocab_size: int, part: RankPart | None) -> Linear:
    """The logits of all ranks' tokens; ``linear`` is this rank's part."""
    if part is None or part.cut.num_ranks == 1:
        return linear
    num_ranks, collectives = part.cut.num_ranks, part.collectives
    sizes = [len(Cut(rank, num_ranks).vocab(vocab_size)) for rank in range(num_ranks)]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        parts = collectives.gather(linear(hidden))
        return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)

    return logits
