"""What a worker has to do, as one gateway knows it: the worker's last report, brought up to date by this gateway's own
attempts.

A report is up to a second old, and a worker may finish half of its requests in that time. So the report is used only for the
load of other gateways; this gateway knows its own at every moment. Pure state; the caller brings the time, in seconds on one
clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.common.kv_geometry import Window, num_whole_blocks
from kvrelay.wire.messages import Status

Key = tuple[str, int]

# A report that comes so soon after an attempt was sent may have left before the attempt arrived.
_ON_THE_WAY_S = 0.05


@dataclass(slots=True, eq=False)
class _Attempt:
    num_tokens: int  # whose KV it needs, so far
    known_s: float | None  # since when the worker knows of it; None while it is on its way through another worker
    num_to_compute: int  # of its tokens, by this worker
    is_computed: bool = False  # its prompt is: the first token has come
    is_reported: bool = False  # the last report counts it

    @property
    def num_uncomputed(self) -> int:
        """Of its prompt's tokens."""
        return 0 if self.is_computed else self.num_to_compute


class Load:
    """One worker's. Sums are kept, not made: they are asked for with each request, of each worker, whatever runs there."""

    def __init__(self, block_size: int, windows: tuple[Window | None, ...] = (None,)) -> None:
        """``windows``: of the groups of layers that the worker keeps K/V of."""
        self._block_size = block_size
        self._windows = windows
        self._attempts: dict[Key, _Attempt] = {}
        self._num_uncomputed = 0  # tokens of prompts of our own attempts
        self._num_unreported_blocks = 0  # of our own attempts that the last report does not count
        self._num_others = 0
        self._tokens_of_others = 0
        self._reported_free_blocks: int | None = None
        self._num_done = 0  # uncomputed tokens of our own attempts that the last report says are computed
        self._known_s = 0.0  # since when what is known to wait is computed
        self._num_given_back = 0  # blocks of attempts that the last report counts and that are over

    def open(self, key: Key, num_tokens: int, now_s: float, *, is_sent: bool, num_to_compute: int) -> None:
        """An attempt begins, or is to have its place. ``num_to_compute``: of its tokens, by this worker.

        ``is_sent``: to this worker, which else hears of it later: from another one (and we with its first token), or from us.
        """
        if not self.num_waiting_tokens:
            self._known_s = now_s
        self._attempts[key] = attempt = _Attempt(num_tokens, now_s if is_sent else None, num_to_compute)
        self._num_uncomputed += attempt.num_uncomputed
        self._num_unreported_blocks += self._blocks_for(num_tokens)

    def on_first_token(self, key: Key, now_s: float, tokens_per_s: float | None) -> None:
        """The attempt's prompt is computed: whoever takes part in it knows of it by now.

        ``tokens_per_s``: of prompts, that the worker computes. Time that this prompt does not account for went into the next.
        """
        if (attempt := self._attempts.get(key)) is not None:
            num_computed = max(0, attempt.num_uncomputed - self._num_done)
            self._known_s = min(now_s, self._known_s + num_computed / tokens_per_s) if tokens_per_s else now_s
            self._forget(attempt)
            attempt.is_computed = True
            if attempt.known_s is None:
                attempt.known_s = now_s

    def close(self, key: Key, num_tokens: int) -> None:
        """An attempt is over, which held ``num_tokens`` at its end."""
        if (attempt := self._attempts.pop(key, None)) is None:
            return
        self._forget(attempt)
        if attempt.is_reported:
            self._num_given_back += self._blocks_for(num_tokens)
        else:
            self._num_unreported_blocks -= self._blocks_for(attempt.num_tokens)

    def on_status(self, status: Status, now_s: float) -> None:
        """The worker reports."""
        for attempt in self._attempts.values():
            attempt.is_reported = attempt.known_s is not None and attempt.known_s < now_s - _ON_THE_WAY_S
        reported = [attempt for attempt in self._attempts.values() if attempt.is_reported]
        # The report counts those of our own, too, that wait for blocks of another worker, which has not told us how far it is.
        num_on_the_way = sum(one.known_s is None for one in self._attempts.values())
        num_ours = len(reported) + min(num_on_the_way, status.num_arriving)
        self._num_others = max(0, status.num_running + status.num_waiting - num_ours)
        num_uncomputed = sum(one.num_uncomputed for one in reported)
        self._tokens_of_others = max(0, status.num_waiting_tokens - num_uncomputed)
        self._num_done = max(0, num_uncomputed - status.num_waiting_tokens)
        self._known_s = now_s
        self._reported_free_blocks = status.num_free_blocks
        self._num_given_back = 0
        unreported = [attempt for attempt in self._attempts.values() if not attempt.is_reported]
        self._num_unreported_blocks = sum(self._blocks_for(one.num_tokens) for one in unreported)

    @property
    def attempts(self) -> list[Key]:
        """Our own."""
        return list(self._attempts)

    @property
    def num_requests(self) -> int:
        """On the worker, or on their way to it."""
        return self._num_others + len(self._attempts)

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts that are not computed yet."""
        return self._tokens_of_others + self._num_uncomputed - self._num_done

    def num_tokens_until(self, key: Key, now_s: float, tokens_per_s: float) -> float:
        """To compute by ``now_s`` before our own attempt has its first token, if prompts are computed in order of arrival."""
        num_tokens = self._tokens_of_others - self._num_done - tokens_per_s * (now_s - self._known_s)
        for other, attempt in self._attempts.items():
            num_tokens += attempt.num_uncomputed
            if other == key:
                return max(num_tokens, attempt.num_uncomputed)
        return 0.0

    def num_waiting_tokens_at(self, now_s: float, tokens_per_s: float) -> float:
        """Of prompts that are not computed by ``now_s``, if the worker computes so many a second."""
        return max(0.0, self.num_waiting_tokens - tokens_per_s * (now_s - self._known_s))

    def num_free_blocks(self, num_blocks: int) -> int:
        """Of ``num_blocks`` in all; none is taken before the first report, but by our own attempts. May be negative."""
        reported = num_blocks if self._reported_free_blocks is None else self._reported_free_blocks
        return min(num_blocks, reported + self._num_given_back) - self._num_unreported_blocks

    def _forget(self, attempt: _Attempt) -> None:
        """The attempt's prompt is computed, or nobody wants it any more."""
        num_uncomputed = attempt.num_uncomputed
        self._num_uncomputed -= num_uncomputed
        self._num_done = max(0, self._num_done - num_uncomputed)

    def _blocks_for(self, num_tokens: int) -> int:
        return num_whole_blocks(self._windows, num_tokens, self._block_size)


class WorkerView(msgspec.Struct, frozen=True, gc=False):  # one per worker and request: a tenth of a dataclass's cost
    """One worker as routing sees it, as far as this gateway knows (see :mod:`kvrelay.gateway.workers.load`)."""

    address: str
    fingerprint: bytes  # of its KV layout
    num_requests: int  # running, waiting, and on their way to it
    num_waiting_tokens: int  # of prompts that are not computed yet
    num_free_blocks: int
    num_blocks: int
    block_size: int
    max_running: int = 0  # requests that it computes at a time; 0: not known yet
    # Of prompts, that it would compute now: a decode worker within its inter-token budget. None: not known; 0: none is left.
    tokens_per_s: float | None = None
    epoch: int = 0  # of its process; another one has nothing cached
    adapters: Sequence[str] = ()  # digests of those that it has loaded
    windows: tuple[Window | None, ...] = (None,)  # of its groups of layers

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take: where groups of layers have windows, fewer than hold them."""
        return num_whole_blocks(self.windows, num_tokens, self.block_size)

    def tokens_for(self, num_tokens: float) -> float:
        """The same in tokens of blocks."""
        return num_whole_blocks(self.windows, math.ceil(num_tokens), self.block_size) * self.block_size

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
        """As a decode worker: requests that it is given at a time; infinite as long as that is not known."""
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
