"""One sequence of a request while a worker computes it: its tokens, its blocks, its state.

Life cycle on a worker (transitions are checked; an illegal one raises)::

    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲           │
       └─ preempt ─┘

A sequence that waits may also be removed: WAITING ──▶ FINISHED. It is owned by one scheduler, and changed by the model thread alone
once that has it. It holds numbers, no tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrelay.common.block_hash import HashChain
from kvrelay.common.fair_queue import Flow, Tags
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_CHUNKS = 256  # that are remembered of one prompt


class SequenceStatus(enum.Enum):
    """Where a sequence stands with its scheduler."""

    WAITING = "waiting"  # for a place in the batch; holds blocks only if its K/V came complete from another worker
    RUNNING = "running"  # has a place and blocks; computes when a step has tokens for it
    FINISHED = "finished"  # computes no more; whoever reads or writes its blocks still gives them back


_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class GuideState(Protocol):
    """Where one sequence stands in its grammar. Depends on the output's tokens only, so replaying them makes an equal one."""

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set the bit of every token that may come next. ``bitmask``: ``[ceil(vocab_size / 32)]``."""

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens of text that can go on in one way only, ``most`` at most; none if it would take long to tell.

        Where a token could be split otherwise, it is as the tokenizer splits it, which a model may do otherwise.
        """

    def num_allowed(self, draft: Seq[int]) -> int:
        """How many of the draft's tokens may come one behind the other; fewer, if it would take long to follow them."""

    def fill_along(self, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
        """As ``fill``, behind each token of a draft that it allows. It stands where it stood then.

        ``bitmask``: ``[len(draft), ceil(vocab_size / 32)]``; what it says of places behind a complete output means nothing.
        """

    def accept(self, token_id: int) -> None:
        """The token came. Raises ValueError if it may not come."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computed of a prompt; times are on the clock of ``arrival_s``."""

    begun_s: float
    ended_s: float
    num_tokens: int


class PromptTrace:
    """Of a sequence whose request is traced: the steps that computed what was submitted of it."""

    def __init__(self, trace_id: str, num_submitted_tokens: int) -> None:
        self.trace_id = trace_id
        self.chunks: list[Chunk] = []  # the first ones
        self._num_submitted_tokens = num_submitted_tokens

    def on_step(self, num_computed_tokens: int, chunk: Chunk) -> None:
        """A step computed ``chunk`` behind ``num_computed_tokens``; one that generates is none of the prompt's."""
        if num_computed_tokens < self._num_submitted_tokens and len(self.chunks) < _MAX_CHUNKS:
            self.chunks.append(chunk)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress of one (request, attempt).

    ``token_ids`` holds the prompt and all output so far; an attempt that replays a lost one starts with the earlier
    attempt's output already in it. ``num_computed_tokens`` counts the leading tokens whose K/V lie in the blocks of
    ``block_tables``; a new sequence that found a cached prefix starts above 0.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int  # of the client's prompt; the rest of token_ids is output
    sampling: SamplingParams
    arrival_s: float  # monotonic clock of this process
    # By group of layers its physical blocks, of which those in front of a group's window may be anybody's; none without blocks.
    block_tables: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache when the sequence was first admitted
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    failure: str | None = None  # why it cannot go on, of its own fault: its guide does not allow the token that came
    num_preemptions: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # those there are, if sampling asks for them
    guide: GuideState | None = None  # where the output stands in its grammar
    beam: int = 0  # which of a beam search's sequences; they share the key
    chain: HashChain | None = None  # of its blocks; None: no scheduler has the sequence
    retention: Retention | None = None  # how long its request wants its blocks to stay cached
    trace: PromptTrace | None = None  # None: nobody asks
    adapter: int = 0  # the engine's slot of the adapter that computes it; 0: the model as it is
    flow: Flow = field(default_factory=Flow)
    deadline_s: float = math.inf  # on the same clock; when nobody waits for it any more
    tags: Tags = field(default_factory=Tags)  # by which it gets its turn

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, attempt): unique on a worker, but for the beams of one search."""
        return (self.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that it has in every group."""
        tables = self.block_tables
        return len(tables[0]) if len(tables) == 1 else min(map(len, tables), default=0)  # asked for every row of a step

    def append_blocks(self, block_tables: list[list[int]]) -> None:
        """Further blocks, of each group."""
        for table, block_ids in zip(self.block_tables, block_tables, strict=True):
            table.extend(block_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, earlier attempts' included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V must still be computed before the next token can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """How many leading tokens may be found in the prefix cache instead of computed.

        Not the last one: its logits are what is sampled from. Nor those whose predictions are log probabilities of the prompt
        that are still to be made.
        """
        num_missing = self.num_prompt_tokens - 1 - len(self.prompt_logprobs)
        if self.sampling.num_prompt_logprobs is not None and num_missing > 0:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    @property
    def needs_host_to_sample(self) -> bool:
        """Whether its next token can only be sampled once the host knows the one in front of it.

        Penalties count a token that the host does not know on the device; bias, allowed tokens and ``min_tokens`` depend on
        positions only.
        """
        sampling = self.sampling
        return bool(
            self.guide is not None
            or sampling.watermark is not None
            or sampling.processors
            or any(len(word) > 1 for word in sampling.bad_words)
        )

    def block_hashes(self, num_blocks: int) -> list[bytes]:
        """Of the leading ``num_blocks`` blocks, which its tokens must fill."""
        assert self.chain is not None, f"sequence {self.key} has no chain: its blocks cannot be shared"
        return self.chain.hashes(self.token_ids, num_blocks)

    @property
    def is_over(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None or self.failure is not None

    def set_status(self, status: SequenceStatus) -> None:
        """Move to ``status``. Raises ValueError if the table has no such transition."""
        if status not in _TRANSITIONS[self.status]:
            raise ValueError(f"sequence {self.key}: no transition {self.status.name} -> {status.name}")
        self.status = status

    def append(self, token: SampledToken, max_model_len: int) -> FinishReason | None:
        """Take a sampled token in; returns why the sequence ends with it, or None if it goes on.

        Sets ``finish_reason``, or ``failure`` if the guide does not allow the token, but not the status: blocks are the
        scheduler's to release.
        """
        self.token_ids.append(token.token_id)
        is_stop = token.token_id in self.sampling.stop_token_ids
        if is_stop or (self.guide is not None and self._completes_guide(token.token_id, self.guide)):
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.sampling.max_tokens or self.num_tokens >= max_model_len:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def _completes_guide(self, token_id: int, guide: GuideState) -> bool:
        try:
            guide.accept(token_id)
        except ValueError as error:
            self.failure = str(error)  # one sequence's trouble: it must not end the step, and all in it
            return False
        return guide.is_complete
