"""A rank's part of a model: products whose results are sums over ranks, and a vocabulary of which each has a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.ops import Linear


class Collectives(Protocol):
    """What the ranks of a stage do together. Every one calls the same in the same order, with tensors of the same shape."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up over ranks, in place; the same bits on every rank."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``part``, in the order of ranks."""

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, of all stages; waits for them."""


class StageLine(Protocol):
    """A rank's way to those of the stages in front of it and behind it that have its part. Both get the same steps in one order."""

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill ``hidden`` with what the stage in front has sent; waits for it."""

    def send(self, hidden: torch.Tensor) -> None:
        """To the stage behind, which may still be busy: nobody waits for it. ``hidden`` does not change any more."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """Which part of a model this process computes, and its way to the others."""

    cut: Cut
    collectives: Collectives
    meet: Callable[
        [], None
    ]  # wait until all ranks are here, however long they take to load; collectives wait for seconds
    num_local: int  # ranks that share this host's cores
    pool_memory: int | None = None  # a descriptor of memory for its KV pool, which its leader shares; None: its own
    line: StageLine | None = None  # of several stages


def summed(linear: Linear, part: RankPart | None) -> Linear:
    """The product over all ranks' inputs, of which ``linear`` has this rank's."""
    if part is None or part.cut.num_ranks == 1:
        return linear
    collectives = part.collectives
    return lambda hidden: collectives.sum(linear(hidden))


def embedding(weight: torch.Tensor, vocab_size: int, part: RankPart | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids ``[n]`` -> ``[n, hidden]``, new memory. ``weight``: this rank's tokens."""
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
    """The logits of all ranks' tokens, of which ``linear`` has this rank's."""
    if part is None or part.cut.num_ranks == 1:
        return linear
    num_ranks, collectives = part.cut.num_ranks, part.collectives
    sizes = [len(Cut(rank, num_ranks).vocab(vocab_size)) for rank in range(num_ranks)]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        parts = collectives.gather(linear(hidden))
        return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)

    return logits
