"""A worker's load, as one gateway knows it: the worker's last report, updated with this gateway's own attempts.

A report is up to a second old, and a worker may finish half of its requests in that time. So the report is used only for the load
of other gateways; this gateway always knows its own. Pure state; the caller passes the time, in seconds on one clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.common.kv_geometry import Window, num_whole_blocks
from kvrelay.wire.messages import Status

Key = tuple[str, int]

# A report that arrives sooner than this after an attempt was sent may not include the attempt.
_ON_THE_WAY_S = 0.05


@dataclass(slots=True, eq=False)
class _Attempt:
    num_tokens: int  # tokens whose KV it needs so far
    known_s: float | None  # since when the worker knows it; None while it is on its way through another worker
    num_to_compute: int  # of its tokens, by this worker
    is_computed: bool = False  # its prompt is computed: the first token has come
    is_reported: bool = False  # the last report includes it

    @property
    def num_uncomputed(self) -> int:
        """The prompt tokens that are not computed yet."""
        return 0 if self.is_computed else self.num_to_compute


class Load:
    """One worker's load. It keeps running sums, because each request asks for the load of each worker."""

    def __init__(self, block_size: int, windows: tuple[Window | None, ...] = (None,)) -> None:
        """``windows``: of the layer groups whose K/V the worker keeps."""
        self._block_size = block_size
        self._windows = windows
        self._attempts: dict[Key, _Attempt] = {}
        self._num_uncomputed = 0  # uncomputed prompt tokens of our own attempts
        self._num_unreported_blocks = 0  # blocks of our own attempts that the last report does not include
        self._num_others = 0
        self._tokens_of_others = 0
        self._reported_free_blocks: int | None = None
        self._num_done = 0  # tokens in ``_num_uncomputed`` that the last report says are computed
        self._known_s = 0.0  # since when the worker computes the waiting tokens
        self._num_given_back = 0  # blocks of finished attempts that the last report still includes

    def open(self, key: Key, num_tokens: int, now_s: float, *, is_sent: bool, num_to_compute: int) -> None:
        """An attempt begins, or a place is kept for it. ``num_to_compute``: tokens for this worker to compute.

        ``is_sent``: it is sent to this worker. Otherwise the worker hears of it later: from another worker (this gateway knows it
        by the first token), or from this gateway.
        """
        if not self.num_waiting_tokens:
            self._known_s = now_s
        self._attempts[key] = attempt = _Attempt(num_tokens, now_s if is_sent else None, num_to_compute)
        self._num_uncomputed += attempt.num_uncomputed
        self._num_unreported_blocks += self._blocks_for(num_tokens)

    def on_first_token(self, key: Key, now_s: float, tokens_per_s: float | None) -> None:
        """The attempt's prompt is computed, so all its workers know of it by now.

        ``tokens_per_s``: the worker's speed with prompts. Time that this prompt does not account for went into the next one.
        """
        if (attempt := self._attempts.get(key)) is not None:
            num_computed = max(0, attempt.num_uncomputed - self._num_done)
            self._known_s = min(now_s, self._known_s + num_computed / tokens_per_s) if tokens_per_s else now_s
            self._forget(attempt)
            attempt.is_computed = True
            if attempt.known_s is None:
                attempt.known_s = now_s

    def close(self, key: Key, num_tokens: int) -> None:
        """An attempt is over; it held ``num_tokens`` at its end."""
        if (attempt := self._attempts.pop(key, None)) is None:
            return
        self._forget(attempt)
        if attempt.is_reported:
            self._num_given_back += self._blocks_for(num_tokens)
        else:
            self._num_unreported_blocks -= self._blocks_for(attempt.num_tokens)

    def on_status(self, status: Status, now_s: float) -> None:
        """Take in the worker's report."""
        for attempt in self._attempts.values():
            attempt.is_reported = attempt.known_s is not None and attempt.known_s < now_s - _ON_THE_WAY_S
        reported = [attempt for attempt in self._attempts.values() if attempt.is_reported]
        # The report includes our own attempts that still wait for another worker's blocks. That worker has not told us how
        # far they are.
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
        """This gateway's own attempts."""
        return list(self._attempts)

    @property
    def num_requests(self) -> int:
        """The requests on the worker and on their way to it."""
        return self._num_others + len(self._attempts)

    @property
    def num_waiting_tokens(self) -> int:
        """The prompt tokens that are not computed yet."""
        return self._tokens_of_others + self._num_uncomputed - self._num_done

    def num_tokens_until(self, key: Key, now_s: float, tokens_per_s: float) -> float:
        """The tokens to compute after ``now_s`` before our own attempt ``key`` has its first token, if prompts are computed in
        order of arrival.
        """
        num_tokens = self._tokens_of_others - self._num_done - tokens_per_s * (now_s - self._known_s)
        for other, attempt in self._attempts.items():
            num_tokens += attempt.num_uncomputed
            if other == key:
                return max(num_tokens, attempt.num_uncomputed)
        return 0.0

    def num_waiting_tokens_at(self, now_s: float, tokens_per_s: float) -> float:
        """The prompt tokens that are not computed by ``now_s`` at this speed."""
        return max(0.0, self.num_waiting_tokens - tokens_per_s * (now_s - self._known_s))

    def num_free_blocks(self, num_blocks: int) -> int:
        """The free blocks of ``num_blocks``. Before the first report, only our own attempts take blocks. May be negative."""
        reported = num_blocks if self._reported_free_blocks is None else self._reported_free_blocks
        return min(num_blocks, reported + self._num_given_back) - self._num_unreported_blocks

    def _forget(self, attempt: _Attempt) -> None:
        """The attempt's prompt is computed or no longer wanted."""
        num_uncomputed = attempt.num_uncomputed
        self._num_uncomputed -= num_uncomputed
        self._num_done = max(0, self._num_done - num_uncomputed)

    def _blocks_for(self, num_tokens: int) -> int:
        return num_whole_blocks(self._windows, num_tokens, self._block_size)


class WorkerView(msgspec.Struct, frozen=True, gc=False):  # one per worker and request: costs a tenth of a dataclass
    """One worker as routing sees it, as far as this gateway knows (see :mod:`kvrelay.gateway.workers.load`)."""

    address: str
    fingerprint: bytes  # of the worker's KV layout
    num_requests: int  # running, waiting, and on their way to the worker
    num_waiting_tokens: int  # prompt tokens that are not computed yet
    num_free_blocks: int
    num_blocks: int
    block_size: int
    max_running: int = 0  # requests that it computes at a time; 0: not known yet
    # Prompt tokens per second that it could compute now; a decode worker within its inter-token budget. None: unknown; 0:
    # no budget left.
    tokens_per_s: float | None = None
    epoch: int = 0  # of its process; a new process has nothing cached
    adapters: Sequence[str] = ()  # digests of the loaded adapters
    windows: tuple[Window | None, ...] = (None,)  # of its groups of layers

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks that ``num_tokens`` take. Layer groups with windows take fewer."""
        return num_whole_blocks(self.windows, num_tokens, self.block_size)

    def tokens_for(self, num_tokens: float) -> float:
        """The same, as tokens of blocks."""
        return num_whole_blocks(self.windows, math.ceil(num_tokens), self.block_size) * self.block_size

    def has_room(self, num_tokens: int) -> bool:
        """Whether enough blocks are free for the request."""
        return self.blocks_for(num_tokens) <= self.num_free_blocks

    def takes_prompt(self, backlog_s: float) -> bool:
        """For a prefill worker: whether its waiting prompts are computed within ``backlog_s``."""
        return self.tokens_per_s is None or self.num_waiting_tokens <= self.tokens_per_s * backlog_s

    def takes_sequence(self, num_tokens: int) -> bool:
        """For a decode worker: whether a request of ``num_tokens`` finds blocks, and a place in the batch soon."""
        return self.num_requests == 0 or (self.num_requests < self.max_taken and self.has_room(num_tokens))

    @property
    def max_taken(self) -> float:
        """For a decode worker: the number of requests that it may be given at a time; infinite if unknown."""
        # Some requests are still on their way while others leave. Without a few more than can run, the batch would have
        # gaps.
        return self.max_running + self.max_running // 4 + 4 if self.max_running else math.inf

    @property
    def is_full(self) -> bool:
        """For a decode worker: whether one more request would wait for a place in the batch."""
        return 0 < self.max_running <= self.num_requests


def choose_fingerprint(
    current: bytes | None, prefills: Sequence[bytes | None], decodes: Sequence[bytes | None]
) -> bytes | None:
    """The KV layout that all workers in use shall share, among those of running workers; None if none is up.

    A layout with workers of both roles comes first, then one with decode workers. Of several, the one in use wins, else the most
    frequent. So a new model under the same labels takes no traffic until it can serve, and none from workers that can.
    """
    fingerprints = {fingerprint for fingerprint in (*prefills, *decodes) if fingerprint is not None}

    def rank(fingerprint: bytes) -> tuple[bool, bool, bool, int, bytes]:
        num_prefills, num_decodes = prefills.count(fingerprint), decodes.count(fingerprint)
        is_whole = num_decodes > 0 and (num_prefills > 0 or not prefills)
        return (is_whole, num_decodes > 0, fingerprint == current, num_prefills + num_decodes, fingerprint)

    return max(fingerprints, key=rank, default=current)
