"""A worker as policies see it, and which KV layout the workers in use share. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class WorkerView(msgspec.Struct, frozen=True, gc=False):  # one per worker and request: a tenth of a dataclass's cost
    """One worker as routing sees it, as far as this gateway knows (see :mod:`kvrelay.gateway.workers.load`)."""

    address: str
    fingerprint: bytes  # of its KV layout
    num_requests: int  # running, waiting, and on their way to it
    num_waiting_tokens: int  # of prompts that are not computed yet
    num_free_blocks: int
    num_blocks: int
    block_size: int
    max_running: int = 0  # requests that it computes at a time; 0: it does not say
    # Of prompts, that it would compute now: a decode worker within its inter-token budget. None: not known; 0: none is left.
    tokens_per_s: float | None = None
    epoch: int = 0  # of its process; another one has nothing cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def has_room(self, num_tokens: int) -> bool:
        """Whether the request's blocks are free."""
        return self.blocks_for(num_tokens) <= self.num_free_blocks

    def takes_prompt(self, backlog_s: float) -> bool:
        """As a prefill worker: whether what waits there is computed within ``backlog_s``."""
        return self.tokens_per_s is None or self.num_waiting_tokens <= self.tokens_per_s * backlog_s

    def takes_sequence(self, num_tokens: int) -> bool:
        """As a decode worker: whether a request of so many tokens finds blocks, and a place in the batch before long."""
        return self.num_requests == 0 or (self.num_requests < self.max_taken and self.has_room(num_tokens))

    @property
    def max_taken(self) -> float:
        """As a decode worker: requests that it is given at a time; infinite if it does not say how many it computes."""
        # Some are on their way while others leave: without a few more than run at a time, the batch would have gaps.
        return self.max_running + self.max_running // 4 + 4 if self.max_running else math.inf

    @property
    def is_full(self) -> bool:
        """As a decode worker: whether one more request would wait for its place in the batch."""
        return 0 < self.max_running <= self.num_requests


def choose_fingerprint(
    current: bytes | None, prefills: Sequence[bytes | None], decodes: Sequence[bytes | None]
) -> bytes | None:
    """The KV layout that all workers in use share, of those that are up; None if nobody is.

    The one with workers of both roles, else with decode workers; of several the one in use, else the most frequent. So a new
    model under the same labels takes no traffic until it can serve, and none from workers that can.
    """
    fingerprints = {fingerprint for fingerprint in (*prefills, *decodes) if fingerprint is not None}

    def rank(fingerprint: bytes) -> tuple[bool, bool, bool, int, bytes]:
        num_prefills, num_decodes = prefills.count(fingerprint), decodes.count(fingerprint)
        is_whole = num_decodes > 0 and (num_prefills > 0 or not prefills)
        return (is_whole, num_decodes > 0, fingerprint == current, num_prefills + num_decodes, fingerprint)

    return max(fingerprints, key=rank, default=current)
