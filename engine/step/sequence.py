"""One sequence of a request while a worker computes it: its tokens, its blocks, its state.

Life cycle on a worker (transitions are checked; an illegal one raises)::

    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲           │
       └─ preempt ─┘

A waiting sequence may also be removed: WAITING ──▶ FINISHED. One scheduler owns it, and then only the model thread changes it. It
holds numbers, no tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrelay.common.block_hash import HashChain
from kvrelay.common.fair_queue import Flow, Tags
from kvrelay.common.images import ImageSpan
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.images.interface import ReadImages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_CHUNKS = 256  # chunks remembered of one prompt


class SequenceStatus(enum.Enum):
    """A sequence's state with its scheduler."""

    WAITING = "waiting"  # waits for a place in the batch; has blocks only if its K/V came complete from another worker
    RUNNING = "running"  # has a place and blocks; computes when a step has tokens for it
    FINISHED = "finished"  # computes no more; readers and writers of its blocks may still have to release them


_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class GuideState(Protocol):
    """The position of one sequence in its grammar.

    It depends only on the output's tokens, so replaying them makes an equal state.
    """

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set the bit of every token that may come next. ``bitmask``: ``[ceil(vocab_size / 32)]``."""

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens of text that can continue in only one way, at most ``most``; none if finding out would take long.

        The text is split as the tokenizer would; the model might split it differently.
        """

    def num_allowed(self, draft: Seq[int]) -> int:
        """How many leading tokens of the draft are allowed; fewer, if following them would take long."""

    def fill_along(self, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
        """Like ``fill``, after each token of an allowed draft. The state's position does not change.

        ``bitmask``: ``[len(draft), ceil(vocab_size / 32)]``; rows after a complete output are meaningless.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises ValueError if it is not allowed."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computed of a prompt. Times are on the clock of ``arrival_s``."""

    begun_s: float
    ended_s: float
    num_tokens: int


class PromptTrace:
    """For a sequence of a traced request: the steps that computed its submitted tokens."""

    def __init__(self, trace_id: str, num_submitted_tokens: int) -> None:
        self.trace_id = trace_id
        self.chunks: list[Chunk] = []  # the first ones
        self._num_submitted_tokens = num_submitted_tokens

    def on_step(self, num_computed_tokens: int, chunk: Chunk) -> None:
        """A step computed ``chunk`` after ``num_computed_tokens``. Ignored if the step generates."""
        if num_computed_tokens < self._num_submitted_tokens and len(self.chunks) < _MAX_CHUNKS:
            self.chunks.append(chunk)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress of one (request, attempt).

    ``token_ids`` has the prompt and all output so far; an attempt that replays a lost one starts with the earlier output. The K/V
    of the leading ``num_computed_tokens`` tokens are in the blocks of ``block_tables``. A new sequence that found a cached prefix
    starts above 0.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int  # of the client's prompt; the rest of token_ids is output
    sampling: SamplingParams
    arrival_s: float  # monotonic clock of this process
    # Its physical blocks by layer group; entries before a group's window are arbitrary. Empty without blocks.
    block_tables: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache when the sequence was first admitted
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    failure: str | None = None  # why it cannot continue by its own fault: its guide does not allow the sampled token
    num_preemptions: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # those computed so far, if asked for
    guide: GuideState | None = None  # where the output stands in its grammar
    beam: int = 0  # its number in a beam search, whose sequences share the key
    chain: HashChain | None = None  # hashes of its blocks; None: no scheduler has the sequence
    retention: Retention | None = None  # how long its request wants its blocks to stay cached
    trace: PromptTrace | None = None  # None: not traced
    adapter: int = 0  # the engine's slot of its adapter; 0: the plain model
    flow: Flow = field(default_factory=Flow)
    deadline_s: float = math.inf  # when its request times out, on the same clock
    tags: Tags = field(default_factory=Tags)  # decide when it gets its turn
    spans: Seq[ImageSpan] = ()  # of the images in its prompt
    images: ReadImages | None = None  # the same images for the encoder; None on workers that do not read images
    position_offset: int = 0  # added to positions behind the prompt in rotary embeddings
    has_whole_images: bool = False  # one step must compute all tokens of an image, except those that are cached

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, attempt): unique on a worker, except for the beams of one search."""
        return (self.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that it has in every group."""
        tables = self.block_tables
        return len(tables[0]) if len(tables) == 1 else min(map(len, tables), default=0)  # read for every row of a step

    def append_blocks(self, block_tables: list[list[int]]) -> None:
        """Append further blocks of each group."""
        for table, block_ids in zip(self.block_tables, block_tables, strict=True):
            table.extend(block_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, that of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V must still be computed before the next token can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """The number of leading tokens that may come from the prefix cache instead of being computed.

        The last one may not, because its logits are needed for sampling. Neither may tokens that predict prompt tokens whose log
        probabilities are still missing.
        """
        num_missing = self.num_prompt_tokens - 1 - len(self.prompt_logprobs)
        if self.sampling.num_prompt_logprobs is not None and num_missing > 0:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    @property
    def whole_spans(self) -> Seq[ImageSpan]:
        """The places of images whose tokens one step must compute together."""
        return self.spans if self.has_whole_images else ()

    @property
    def may_start_again(self) -> bool:
        """Whether this worker could compute all its tokens. False for images that only another worker can read."""
        return not self.spans or self.images is not None

    @property
    def needs_host_to_sample(self) -> bool:
        """Whether its next token can be sampled only once the host knows the token before.

        Penalties count an unknown token on the device. Bias, allowed tokens and ``min_tokens`` depend only on positions.
        """
        sampling = self.sampling
        return bool(
            self.guide is not None
            or sampling.watermark is not None
            or sampling.processors
            or any(len(word) > 1 for word in sampling.bad_words)
        )

    def block_hashes(self, num_blocks: int) -> list[bytes]:
        """The hashes of the leading ``num_blocks`` blocks, which its tokens must fill."""
        assert self.chain is not None, f"sequence {self.key} has no chain: its blocks cannot be shared"
        return self.chain.hashes(self.token_ids, num_blocks)

    @property
    def is_over(self) -> bool:
        """Whether no further token follows."""
        return self.finish_reason is not None or self.failure is not None

    def set_status(self, status: SequenceStatus) -> None:
        """Move to ``status``. Raises ValueError if the table has no such transition."""
        if status not in _TRANSITIONS[self.status]:
            raise ValueError(f"sequence {self.key}: no transition {self.status.name} -> {status.name}")
        self.status = status

    def append(self, token: SampledToken, max_model_len: int) -> FinishReason | None:
        """Append a sampled token. Returns why the sequence ends with it, or None if it continues.

        Sets ``finish_reason``, or ``failure`` if the guide does not allow the token. Does not set the status, because the scheduler
        must release the blocks.
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
            self.failure = str(error)  # only this sequence fails, not the step
            return False
        return guide.is_complete
