"""An engine without a model: real blocks, real bytes, made-up tokens. For tests, and for load without weights or torch.

The K/V of a token is a digest of all tokens up to it, written into the pool like real K/V. Before a token is sampled the
engine reads back *every* position's bytes and compares them with what they must be, so a block that was swapped,
stale or never written is found exactly where a real model would silently compute nonsense.
"""

from __future__ import annotations

import math
import mmap
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.step import FakeStep, Share
from kvrelay.engine.step.interface import LaunchedStep, StepRow
from kvrelay.engine.step.sequence import GuideState, Sequence, SequenceStatus

_DIGEST_NBYTES = 8
_MIN_MEMORIES = 64  # sequences remembered before anyone looks for finished ones among them
_SEED_MASK = 2**64 - 1  # as the sampler's
_MAX_LOOKS = 100  # for a token that may come
_PLAIN_TOKENS = range(1000, 20_000)


class MemoryStore:
    """A pool in plain memory, zeroed. Implements :class:`kvrelay.engine.step.interface.BlockStore`.

    A page is taken from the system when it is first written, so that a hundred idle workers do not hold a hundred pools.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self._memory = memoryview(mmap.mmap(-1, num_blocks * block_nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def block(self, block_id: int) -> memoryview:
        """The block's memory."""
        return self._memory[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def open_read(self, block_id: int) -> memoryview:
        """See BlockStore."""
        return self.block(block_id).toreadonly()

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""

    def open_write(self, block_id: int) -> memoryview:
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
) -> ModelCard:
    """A card for a fake engine; equal ``model_id``, ``block_size`` and ``token_nbytes`` give equal fingerprints."""
    layout = KvLayout(
        model_id=model_id,
        weights_digest="fake",
        kv_dtype="bytes",
        num_layers=1,
        num_kv_heads=1,
        head_dim=token_nbytes,
        block_size=block_size,
        rope="{}",
    )
    return ModelCard(
        layout=layout,
        vocab_size=vocab_size,
        max_model_len=min(max_model_len, num_blocks * block_size),
        num_blocks=num_blocks,
        block_nbytes=block_size * token_nbytes,
        processors=processors,
    )


class KvMismatchError(AssertionError):
    """The pool does not hold the K/V that the sequence's tokens must have: some hand-off or allocation lied."""


@dataclass(frozen=True, slots=True)
class FakePace:
    """How long a step takes: ``step_s``, and ``token_s`` more for every token of a prompt."""

    step_s: float
    token_s: float

    def of(self, shares: Seq[Share]) -> float:
        """Seconds for a step; a share of one token is a decode row."""
        return self.step_s + self.token_s * sum(share.num_tokens for share in shares if share.num_tokens > 1)


@dataclass(slots=True)
class _Memory:
    """What is known of a sequence from earlier steps. Tokens are only ever appended to a sequence."""

    digests: bytearray  # of its leading tokens, 8 bytes each
    verified_blocks: list[int]  # its leading blocks when positions were last read back …
    num_verified: int = 0  # … and how many of those positions still hold


class FakeEngine:
    """Implements :class:`kvrelay.engine.step.interface.Engine`; ``on_step`` is called at the start of every step.

    Tests read every position back before every token. For load, ``reads_back_once`` reads back what this worker has not read
    yet: everything before a sequence's first token here (that is what a hand-off must prove), and again after its blocks
    changed or its computation started over; then only new positions. So a step costs what its new tokens cost. With a
    ``pace`` a step sleeps until that much time has passed since it began.

    One that ``runs_ahead`` computes a launched step only when it is waited for, with blocks and positions as they were at the
    launch: as late as a device may. Whoever gives blocks away that a step under way still writes to is found out, and so is who
    lets a deferred step sample before its sequences have their tokens.
    """

    def __init__(
        self,
        card: ModelCard,
        on_step: Callable[[Seq[StepRow]], None] = lambda rows: None,
        *,
        pace: FakePace | None = None,
        reads_back_once: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        if card.layout.head_dim < _DIGEST_NBYTES:
            raise ValueError(f"{card.layout.head_dim} bytes per token; a fake engine needs at least {_DIGEST_NBYTES}")
        self.card = card
        self.store = MemoryStore(card.num_blocks, card.block_nbytes)
        self._on_step = on_step
        self._pace = pace
        self._reads_back_once = reads_back_once
        self.runs_ahead = runs_ahead
        self._token_nbytes = card.layout.head_dim
        self._memories: dict[Sequence, _Memory] = {}
        self._max_memories = _MIN_MEMORIES

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """See Engine."""
        contents = [bytes(self.store.block(source)) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self.store.block(target)[:] = content

    def check_device(self) -> None:
        """See Engine. There is none."""

    def launch(self, rows: Seq[StepRow], behind: LaunchedStep | None = None) -> LaunchedStep:
        """See Engine."""
        assert behind is None or isinstance(behind, FakeStep)
        assert behind is None or not behind.is_deferred, "the step in front was not told to sample"
        share_of = Share.for_later if self.runs_ahead else Share.of
        return FakeStep(self.compute, [share_of(row) for row in rows], behind)

    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        """See Engine. Raises KvMismatchError if a sampling row's K/V in the pool is not its tokens' K/V."""
        return self.compute([Share.of(row) for row in rows])

    def compute(self, shares: Seq[Share]) -> list[SampledToken | None]:
        """All of a step, now."""
        until_s = 0.0 if self._pace is None else time.monotonic() + self._pace.of(shares)
        rows = [StepRow(share.sequence, share.num_tokens) for share in shares]
        self._on_step(rows)
        results = [self._run(share) for share in shares]
        if len(self._memories) > self._max_memories:
            self._forget_finished()
        if self._pace is not None:
            time.sleep(max(0.0, until_s - time.monotonic()))
        return results

    def _run(self, share: Share) -> SampledToken | None:
        sequence = share.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + share.num_tokens
        if share.num_tokens < 1 or end > sequence.num_tokens:
            raise ValueError(f"{sequence.key}: no {share.num_tokens} tokens behind {sequence.num_computed_tokens}")
        if len(sequence.block_table) * self.card.layout.block_size < end:
            raise ValueError(f"{sequence.key}: {len(sequence.block_table)} blocks do not hold {end} tokens")
        memory = self._remember(share.owner, sequence.token_ids)
        # A preempted sequence may get the same blocks again, with others' bytes in them: what it had read then proves nothing.
        blocks_stayed = memory.verified_blocks == sequence.block_table[: len(memory.verified_blocks)]
        if start < memory.num_verified or not blocks_stayed:
            memory.num_verified = 0
        for first, last in self._spans(start, end):
            self._slots(sequence, first, last)[:] = self._kv(memory, first, last)
        if sequence.sampling.num_prompt_logprobs is not None:
            self._add_prompt_logprobs(sequence, memory, end)
        if not share.samples:
            return None
        self._read_back(sequence, memory, end)
        digest = bytes(memory.digests[-_DIGEST_NBYTES:])
        token_id = next_token(sequence, digest, self.card.vocab_size)
        if sequence.guide is not None:
            token_id = _guided(sequence.guide, token_id, self.card.vocab_size)
        if sequence.sampling.beam_search is None:
            if sequence.sampling.num_logprobs is None:
                return SampledToken(token_id)
            return with_logprobs(token_id, digest, sequence.sampling.num_logprobs, self.card.vocab_size)
        return SampledToken(token_id, top_logprobs=candidates(sequence.sampling, digest, self.card.vocab_size))

    def _add_prompt_logprobs(self, sequence: Sequence, memory: _Memory, end: int) -> None:
        """See StepRow; what is there from before a preemption stays."""
        for position in range(len(sequence.prompt_logprobs) + 1, min(end + 1, sequence.num_prompt_tokens)):
            digest = bytes(memory.digests[(position - 1) * _DIGEST_NBYTES : position * _DIGEST_NBYTES])
            num_top = sequence.sampling.num_prompt_logprobs or 0
            token = with_logprobs(sequence.token_ids[position], digest, num_top, self.card.vocab_size)
            sequence.prompt_logprobs.append(token)

    def _remember(self, sequence: Sequence, token_ids: Seq[int]) -> _Memory:
        """The sequence's memory, with a digest of each of its ``token_ids`` as they stand."""
        memory = self._memories.get(sequence)
        if memory is None:
            memory = self._memories[sequence] = _Memory(bytearray(), [])
        digests = memory.digests
        num_known = len(digests) // _DIGEST_NBYTES
        if num_known < len(token_ids):
            for digest in token_digests(token_ids[num_known:], bytes(digests[-_DIGEST_NBYTES:])):
                digests += digest
        return memory

    def _forget_finished(self) -> None:
        self._memories = {
            sequence: memory
            for sequence, memory in self._memories.items()
            if sequence.status is not SequenceStatus.FINISHED
        }
        self._max_memories = 2 * len(self._memories) + _MIN_MEMORIES

    def _read_back(self, sequence: Sequence, memory: _Memory, end: int) -> None:
        for first, last in self._spans(memory.num_verified if self._reads_back_once else 0, end):
            found, expected = bytes(self._slots(sequence, first, last)), self._kv(memory, first, last)
            if found != expected:
                differs = next(index for index, byte in enumerate(found) if byte != expected[index])
                position = first + differs // self._token_nbytes
                raise KvMismatchError(f"{sequence.key}: K/V of position {position} is not that of its tokens")
        if memory.num_verified == 0 or len(memory.verified_blocks) != len(sequence.block_table):
            memory.verified_blocks = list(sequence.block_table)
        memory.num_verified = end

    def _spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Positions ``start`` to ``end``, cut where a block ends."""
        if end - start == 1:  # every decode row
            return [(start, end)]
        block_size = self.card.layout.block_size
        cuts = [start, *range((start // block_size + 1) * block_size, end, block_size), end]
        return list(pairwise(cuts)) if start < end else []

    def _slots(self, sequence: Sequence, first: int, last: int) -> memoryview:
        """The pool's memory of positions ``first`` to ``last``, which are one block's."""
        block_index, offset = divmod(first, self.card.layout.block_size)
        start = offset * self._token_nbytes
        block = self.store.block(sequence.block_table[block_index])
        return block[start : start + (last - first) * self._token_nbytes]

    def _kv(self, memory: _Memory, first: int, last: int) -> bytes:
        """What these positions must hold: of each its digest, repeated."""
        digests, size, times = memory.digests, self._token_nbytes, self._token_nbytes // _DIGEST_NBYTES + 1
        starts = range(first * _DIGEST_NBYTES, last * _DIGEST_NBYTES, _DIGEST_NBYTES)
        return b"".join([(digests[start : start + _DIGEST_NBYTES] * times)[:size] for start in starts])


def token_digests(token_ids: Seq[int], parent: bytes = b"") -> list[bytes]:
    """One digest per token, over that token and all before it; ``parent`` is the digest of what came before ``token_ids``."""
    digests: list[bytes] = []
    for token_id in token_ids:
        parent = xxhash.xxh3_64_digest(parent + token_id.to_bytes(4, "little"))
        digests.append(parent)
    return digests


def next_token(sequence: Sequence, digest: bytes, vocab_size: int) -> int:
    """The token behind ``digest``: the same on every worker; depends on seed and choice unless the sampling is greedy.

    No stop token before ``min_tokens``, if a few more looks at the vocabulary find another one.
    """
    sampling = sequence.sampling
    salt = b"" if sampling.temperature == 0 else (sampling.seed & _SEED_MASK).to_bytes(8, "little")
    if salt and sampling.choice:
        salt += sampling.choice.to_bytes(8, "little")
    token_id = _token_of(digest + salt, vocab_size)
    if sequence.num_output_tokens < sampling.min_tokens:
        for look in range(_MAX_LOOKS):
            if token_id not in sampling.stop_token_ids:
                break
            token_id = _token_of(digest + salt + bytes([look]), vocab_size)
    return token_id


def _guided(guide: GuideState, token_id: int, vocab_size: int) -> int:
    """The token, or the next one in the vocabulary that the guide allows; if it allows none, the token."""
    import numpy as np  # noqa: PLC0415 - guides need it, and nothing else here

    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    guide.fill(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)]) if len(allowed) else token_id


def with_logprobs(token_id: int, digest: bytes, num_top: int, vocab_size: int) -> SampledToken:
    """``token_id`` behind ``digest`` with made-up log probabilities: the same on every worker.

    The likeliest is the greedy token, each next one half as likely; a token that is not among them is less likely than all.
    """
    looks = dict.fromkeys(_token_of(digest + bytes(look), vocab_size) for look in range(2 * num_top))
    top = tuple((other, -math.log(2) * (rank + 1)) for rank, other in enumerate(list(looks)[:num_top]))
    return SampledToken(token_id, dict(top).get(token_id, -math.log(2) * (len(top) + 1)), top)


def candidates(sampling: SamplingParams, digest: bytes, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens behind ``digest``, for a beam search: as many as it asks for, all of them plain ones, at made-up odds.

    A stop token is among the first in one of eight places, so that beams end at different lengths.
    """
    draws = random.Random(digest)  # noqa: S311 - the same ones on every worker are wanted
    count = min(sampling.num_top_logprobs or 0, vocab_size)
    plain = _PLAIN_TOKENS if vocab_size >= _PLAIN_TOKENS.stop else range(vocab_size)
    token_ids = draws.sample(plain, count)
    if sampling.stop_token_ids and draws.randrange(8) == 0:
        stop = draws.choice(sampling.stop_token_ids)
        token_ids = [stop, *(token_id for token_id in token_ids if token_id != stop)][:count]
    log_probs = sorted((math.log(1.0 - draws.random()) - 0.1 for _ in token_ids), reverse=True)
    return tuple(zip(token_ids, log_probs, strict=True))


def expected_output(token_ids: Seq[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a greedy fake engine generates after ``token_ids``."""
    digest = token_digests(token_ids)[-1]
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(_token_of(digest, vocab_size))
        digest = token_digests(output[-1:], digest)[-1]
    return output


def _token_of(digest: bytes, vocab_size: int) -> int:
    """A large vocabulary's first ids are special and its last ones rare: neither end of text nor half a character."""
    plain = _PLAIN_TOKENS if vocab_size >= _PLAIN_TOKENS.stop else range(vocab_size)
    return plain[xxhash.xxh3_64_intdigest(digest) % len(plain)]
