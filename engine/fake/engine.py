"""An engine without a model: real blocks, real bytes, made-up tokens. For tests, and for load without weights or torch.

The K/V of a token is a digest of the adapter, all tokens up to it and the images that began up to it, written into the pool like
real K/V. Before the engine
samples a token it reads back the bytes of *every* position and compares them with the expected ones. So it detects a block that was
swapped, stale or never written, where a real model would silently compute nonsense. In a group with a window it reads the positions
that the step's tokens see, even if the step samples nothing.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.common.block_digests import landed
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup, Window, window_at
from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.fake.adapters import FakeAdapters
from kvrelay.engine.fake.images import fake_offset
from kvrelay.engine.fake.language import (
    candidates,
    digests_by_start,
    guided,
    masks_of,
    next_token,
    token_digests,
    with_logprobs,
)
from kvrelay.engine.fake.step import FakeSequence, FakeSlots, FakeStep, Memory, Share
from kvrelay.engine.step.interface import LaunchedStep
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan

_DIGEST_NBYTES = 8
_NUM_SLOTS = 4096  # more than any step needs, since slots cost nothing here


class MemoryStore:
    """A pool in plain memory, zeroed. Implements :class:`kvrelay.engine.step.interface.BlockStore`.

    A page takes memory only once it is written, so a hundred idle workers do not hold a hundred pools.
    """

    register = None  # there is no device

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self._memory = memoryview(mmap.mmap(-1, num_blocks * block_nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def block(self, block_id: int) -> memoryview:
        """The block's memory."""
        return self._memory[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def open_read(self, block_id: int, group: int = 0) -> memoryview:
        """See BlockStore."""
        return self.block(block_id).toreadonly()

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """See BlockStore."""
        digests = landed(payload, self.open_write(block_id, group)[: len(payload)])
        self.close_write(block_id)
        return lambda: digests

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        """See BlockStore."""
        return self.block(block_id)

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""


def fake_card(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    token_nbytes: int = 32,
    max_model_len: int = 4096,
    model_id: str = "fake",
    vocab_size: int = 1000,
    processors: tuple[str, ...] = (),
    windows: tuple[Window | None, ...] = (None,),
    no_images: str = "this fake engine reads no images",
) -> ModelCard:
    """A card for a fake engine. Equal ``model_id``, ``block_size``, ``token_nbytes`` and ``windows`` give equal fingerprints.

    ``windows``: one for each group of layers. Each group keeps ``token_nbytes`` per token. ``no_images``: see ModelCard.
    """
    groups = tuple(
        KvGroup(
            kind=GroupKind.FULL if window is None else GroupKind.WINDOW,
            window=window,
            layers=(number,),
            num_kv_heads=1,
            key_size=token_nbytes,
            value_size=0,
            dtype="uint8",
        )
        for number, window in enumerate(windows)
    )
    layout = KvLayout(
        model_id=model_id,
        weights_digest="fake",
        geometry=KvGeometry(groups=groups, block_size=block_size),
        rope="{}",
    )
    return ModelCard(
        layout=layout,
        vocab_size=vocab_size,
        max_model_len=min(max_model_len, num_blocks * block_size),
        num_blocks=num_blocks,
        processors=processors,
        no_images=no_images,
    )


class KvMismatchError(AssertionError):
    """The pool does not hold the K/V of the sequence's tokens: a hand-off or an allocation is wrong."""


@dataclass(frozen=True, slots=True)
class FakePace:
    """The time of a step: ``step_s``, plus ``token_s`` for every prompt token, plus ``row_s`` for every decode row."""

    step_s: float
    token_s: float
    row_s: float = 0.0

    def of(self, shares: Seq[Share]) -> float:
        """Seconds for a step. A share of one token is a decode row."""
        num_tokens = [share.num_tokens for share in shares]
        num_rows = num_tokens.count(1)
        return self.step_s + self.token_s * (sum(num_tokens) - num_rows) + self.row_s * num_rows


class FakeEngine:
    """Implements :class:`kvrelay.engine.step.interface.Engine`. ``on_step`` is called at the start of every step.

    By default it reads every position back before every token, for tests. For load, ``reads_back_once`` reads back only what this
    worker has not read yet, so a step's cost depends on its new tokens. It reads everything before a sequence's first token here,
    which checks a hand-off. It does so again after the blocks changed or the computation restarted. With a ``pace`` a step sleeps
    until that much time has passed since it began.

    An engine that ``runs_ahead`` computes a launched step only when the caller waits for it, with the blocks and positions of the
    launch: as late as a device may. This detects callers that give away blocks of a pending step, or that let a deferred step
    sample before its sequences have their tokens.
    """

    def __init__(
        self,
        card: ModelCard,
        on_step: Callable[[Seq[Share]], None] = lambda shares: None,
        *,
        pace: FakePace | None = None,
        reads_back_once: bool = False,
        runs_ahead: bool = False,
        has_adapters: bool = False,
        num_stages: int = 1,
        has_whole_images: bool = False,
    ) -> None:
        """``has_whole_images``: refuse rows that end inside an image, as a model would whose image tokens see each other."""
        geometry = card.layout.geometry
        self._windows = geometry.windows
        self._token_nbytes = geometry.groups[0].token_nbytes
        if self._token_nbytes < _DIGEST_NBYTES:
            raise ValueError(f"{self._token_nbytes} bytes per token; a fake engine needs at least {_DIGEST_NBYTES}")
        self.card = card
        self.store = MemoryStore(card.num_blocks * len(self._windows), geometry.physical_nbytes)
        self._on_step = on_step
        self._pace = pace
        self._reads_back_once = reads_back_once
        self.runs_ahead = runs_ahead
        self.num_stages = num_stages
        self._has_whole_images = has_whole_images
        self._adapters = FakeAdapters()
        self.adapters = self._adapters if has_adapters else None
        self.num_slots = _NUM_SLOTS
        self.profiler = None
        self._slots = FakeSlots(len(self._windows))
        self._launched: FakeStep | None = None  # the last launched step

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """See Engine."""
        contents = [bytes(self.store.block(source)) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self.store.block(target)[:] = content

    def check_device(self) -> None:
        """See Engine. There is no device."""

    def not_live(self) -> list[str]:
        """See Engine."""
        return []

    def close(self) -> None:
        """See Engine."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Engine. Waiting for the step raises KvMismatchError if the pool's K/V of a sampling row is not that of its tokens."""
        # After an error there is no previous step.
        in_front = None if plan.resets else self._launched
        assert in_front is None or not in_front.is_deferred, "the step in front was not told to sample"
        self._slots.apply(plan)
        shares = [Share(self._slots.sequences[row.slot].copy(row.draft_tokens), row) for row in plan.rows]
        for share in shares:
            self._require_fit(share)
        behind = in_front if any(row.is_fed for row in plan.rows) else None
        self._launched = FakeStep(self._compute, shares, plan.sampling, self._slots, behind)
        return self._launched

    def _require_fit(self, share: Share) -> None:
        row, sequence = share.row, share.sequence
        end = row.start + row.num_tokens
        if row.num_tokens < 1 or end > len(sequence.token_ids) + row.is_fed:
            raise ValueError(f"{sequence.name}: no {row.num_tokens} tokens behind {row.start}")
        num_blocks = min(map(len, sequence.block_tables))
        if num_blocks * self.card.layout.block_size < end:
            raise ValueError(f"{sequence.name}: {num_blocks} blocks do not hold {end} tokens")
        if sequence.spans:
            self._require_images(sequence, row.start, end)

    def _require_images(self, sequence: FakeSequence, start: int, end: int) -> None:
        """Raise ValueError if the engine does not have what the tokens from ``start`` to ``end`` take of their images."""
        read, offset = sequence.images, fake_offset(sequence.spans)
        computed = [span for span in sequence.spans if span.start < end and start < span.stop]
        if computed and (read is None or read.spans != sequence.spans):
            raise ValueError(f"{sequence.name}: tokens {start} to {end} are of images that were not read")
        if self._has_whole_images and any(end < span.stop for span in computed):
            raise ValueError(f"{sequence.name}: tokens {start} to {end} are a part of an image")
        if sequence.position_offset != offset:
            raise ValueError(f"{sequence.name}: positions are off by {sequence.position_offset}, not {offset}")

    def _compute(self, shares: Seq[Share], inputs: SamplingInputs) -> list[RowResult]:
        """Compute a whole step."""
        until_s = 0.0 if self._pace is None else time.monotonic() + self._pace.of(shares)
        self._on_step(shares)
        masks = masks_of(inputs.rules)
        results, num_sampled = [], 0
        for share in shares:
            results.append(self._run(share, masks.get(num_sampled)))
            num_sampled += share.row.num_samples
        if self._pace is not None:
            time.sleep(max(0.0, until_s - time.monotonic()))
        return results

    def _run(self, share: Share, mask: bytes | None) -> RowResult:
        sequence, memory, row, start = share.sequence, share.sequence.memory, share.row, share.row.start
        end = start + share.num_tokens
        self._remember(sequence, self._adapters.root(row.adapter))
        # A preempted sequence may get the same blocks with other content, so its earlier checks are void.
        blocks_stayed = all(
            table[: len(known)] == known
            for known, table in zip(memory.verified_blocks, sequence.block_tables, strict=False)
        )
        if start < memory.num_verified or not blocks_stayed:
            memory.num_verified = 0
        for first, last in self._spans(start, end):
            for group in range(len(self._windows)):
                self._slice(sequence, first, last, group)[:] = self._kv(memory, first, last, group)
        self._read_back(sequence, memory, start, end, is_all=row.num_samples > 0)
        prompt_logprobs = self._prompt_logprobs(share)
        if not share.row.num_samples:
            return RowResult((), prompt_logprobs)
        digest = bytes(memory.digests[-_DIGEST_NBYTES:])
        token_id = next_token(sequence, digest, self.card.vocab_size)
        if mask is not None:
            token_id = guided(mask, token_id, self.card.vocab_size)
        if sequence.sampling.beam_search is not None:
            token = SampledToken(token_id, top_logprobs=candidates(sequence.sampling, digest, self.card.vocab_size))
        elif sequence.sampling.num_logprobs is None:
            token = SampledToken(token_id)
        else:
            token = with_logprobs(token_id, digest, sequence.sampling.num_logprobs, self.card.vocab_size)
        return RowResult((token,), prompt_logprobs)

    def _prompt_logprobs(self, share: Share) -> tuple[SampledToken, ...]:
        if share.row.prompt_logprobs is None:
            return ()
        sequence, digests = share.sequence, share.sequence.memory.digests
        num_top = sequence.sampling.num_prompt_logprobs or 0
        return tuple(
            with_logprobs(
                sequence.token_ids[position],
                bytes(digests[(position - 1) * _DIGEST_NBYTES : position * _DIGEST_NBYTES]),
                num_top,
                self.card.vocab_size,
            )
            for position in range(*share.row.prompt_logprobs)
        )

    def _remember(self, sequence: FakeSequence, root: bytes) -> None:
        """Add a digest for each new token of the sequence. ``root``: the digest before the first token."""
        digests, token_ids = sequence.memory.digests, sequence.token_ids
        num_known = len(digests) // _DIGEST_NBYTES
        if num_known < len(token_ids):
            images = digests_by_start(sequence.spans, num_known)
            for digest in token_digests(token_ids[num_known:], bytes(digests[-_DIGEST_NBYTES:]) or root, images):
                digests += digest

    def _read_back(self, sequence: FakeSequence, memory: Memory, start: int, end: int, *, is_all: bool) -> None:
        """Compare the positions that tokens from ``start`` on see. Without ``is_all``, only in groups with a window."""
        since = memory.num_verified if self._reads_back_once else 0
        for group, window in enumerate(self._windows):
            if window is not None:
                self._compare(sequence, max(since, start + 1 - window_at(window, start)), end, group)
            elif is_all:
                self._compare(sequence, since, end, group)
        if not is_all:
            return
        if memory.num_verified == 0 or list(map(len, memory.verified_blocks)) != list(map(len, sequence.block_tables)):
            memory.verified_blocks = [list(table) for table in sequence.block_tables]
        memory.num_verified = end

    def _compare(self, sequence: FakeSequence, start: int, end: int, group: int) -> None:
        for first, last in self._spans(start, end):
            found, expected = (
                bytes(self._slice(sequence, first, last, group)),
                self._kv(sequence.memory, first, last, group),
            )
            if found != expected:
                differs = next(index for index, byte in enumerate(found) if byte != expected[index])
                position = first + differs // self._token_nbytes
                raise KvMismatchError(
                    f"{sequence.name}: K/V of position {position} in group {group} is not that of its tokens"
                )

    def _spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Positions ``start`` to ``end``, split at block ends."""
        if end - start == 1:  # all decode rows
            return [(start, end)]
        block_size = self.card.layout.block_size
        cuts = [start, *range((start // block_size + 1) * block_size, end, block_size), end]
        return list(pairwise(cuts)) if start < end else []

    def _slice(self, sequence: FakeSequence, first: int, last: int, group: int) -> memoryview:
        """The pool's memory of positions ``first`` to ``last``, which are in one block."""
        block_index, offset = divmod(first, self.card.layout.block_size)
        start = offset * self._token_nbytes
        block = self.store.block(sequence.block_tables[group][block_index])
        return block[start : start + (last - first) * self._token_nbytes]

    def _kv(self, memory: Memory, first: int, last: int, group: int) -> bytes:
        """The expected bytes of these positions: each position's digest, repeated. Groups start at different bytes of it."""
        digests, shift = memory.digests, group % _DIGEST_NBYTES
        end, times = shift + self._token_nbytes, self._token_nbytes // _DIGEST_NBYTES + 2
        starts = range(first * _DIGEST_NBYTES, last * _DIGEST_NBYTES, _DIGEST_NBYTES)
        return b"".join([(digests[start : start + _DIGEST_NBYTES] * times)[shift:end] for start in starts])
