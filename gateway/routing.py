"""Which workers serve a request: pure functions of the workers' last reported state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as routing sees it, as far as this gateway knows (see :mod:`kvrelay.gateway.load`)."""

    address: str
    fingerprint: bytes  # of its KV layout
    num_requests: int  # running, waiting, and on their way to it
    num_waiting_tokens: int  # of prompts that are not computed yet
    num_free_blocks: int
    num_blocks: int
    block_size: int
    max_running: int = 0  # requests that it computes at a time; 0: it does not say
    tokens_per_s: float = 0.0  # of prompts, while it computes; 0: not known

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def has_room(self, num_tokens: int) -> bool:
        """Whether the request's blocks are free."""
        return self.blocks_for(num_tokens) <= self.num_free_blocks

    def takes_prompt(self, backlog_s: float) -> bool:
        """As a prefill worker: whether what waits there is computed within ``backlog_s``."""
        return self.num_waiting_tokens <= self.tokens_per_s * backlog_s or self.tokens_per_s <= 0

    def takes_sequence(self, num_tokens: int) -> bool:
        """As a decode worker: whether a request of so many tokens finds blocks, and a place in the batch before long."""
        if self.num_requests == 0:
            return True
        # Some are on their way while others leave: without a few more than run at a time, the batch would have gaps.
        has_place = self.max_running == 0 or self.num_requests < self.max_running + self.max_running // 4 + 4
        return has_place and self.has_room(num_tokens)


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen pair; without a prefill worker the decode worker prefills itself."""

    prefill: str | None
    decode: str


Policy = Callable[[Sequence[WorkerView], Sequence[WorkerView], int, int], Route | None]


def least_loaded(
    prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], num_tokens: int, sequence_number: int
) -> Route | None:
    """The decode worker with room and the smallest share of its pool in use, the prefill worker with the least to compute.

    ``prefills`` empty means local prefill. A decode worker without room is only taken if none has any. Ties go round by
    ``sequence_number``. None if there is no decode worker, or no prefill worker whose KV fits it.
    """

    def decode_load(view: WorkerView) -> tuple[bool, float, int]:
        used = view.num_blocks - view.num_free_blocks
        return (not view.has_room(num_tokens), used / view.num_blocks, view.num_requests)

    def prefill_load(view: WorkerView) -> tuple[int, int]:
        return (view.num_waiting_tokens, view.num_requests)

    return _pick(
        prefills,
        decodes,
        lambda views: min(_rotated(views, sequence_number), key=prefill_load),
        lambda views: min(_rotated(views, sequence_number), key=decode_load),
    )


def round_robin(
    prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], num_tokens: int, sequence_number: int
) -> Route | None:
    """Everybody in turn, by ``sequence_number``. None as for :func:`least_loaded`."""

    def turn(views: Sequence[WorkerView]) -> WorkerView:
        return _rotated(views, sequence_number)[0]

    return _pick(prefills, decodes, turn, turn)


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


POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def _pick(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    pick_prefill: Callable[[Sequence[WorkerView]], WorkerView],
    pick_decode: Callable[[Sequence[WorkerView]], WorkerView],
) -> Route | None:
    if prefills:
        fingerprints = {view.fingerprint for view in prefills}
        decodes = [view for view in decodes if view.fingerprint in fingerprints]
    if not decodes:
        return None
    decode = pick_decode(decodes)
    if not prefills:
        return Route(None, decode.address)
    fitting = [view for view in prefills if view.fingerprint == decode.fingerprint]
    return Route(pick_prefill(fitting).address, decode.address)


def _rotated(views: Sequence[WorkerView], by: int) -> list[WorkerView]:
    ordered = sorted(views, key=lambda view: view.address)
    return [ordered[(index + by) % len(ordered)] for index in range(len(ordered))]
