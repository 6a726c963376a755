"""The canary: an idle worker computes a known prompt from time to time, and compares the result with its first one.

One step computes the prompt, and each further step one token: greedy, with the base model, without a draft. The digest covers every
byte of K/V that the steps wrote, in all groups of layers and of all ranks, and the tokens with the bits of their log probabilities.
So it shows a wrong bit in all memory that these steps use. It does not show one in another token's embedding, or in an expert that
none of these tokens use. Rounding differs between processors, so later answers are compared with this process's first. All steps
have the same shape each time, so that they round alike.

The canary has its own blocks: it neither reads nor publishes prefix-cache blocks. They are zeroed first, so that bytes that no
layer writes are the same each time. A caller with work for the engine first calls ``abandon``. So a request waits for at most one
step of the canary.

Model thread only. The worker decides what follows from a wrong answer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence, SequenceStatus

_PROMPT_TOKENS = 32  # at most: one small step
_NUM_LOGPROBS = 5
_READ_S = 10.0  # most time for a block's bytes to come from a device
_MULTIPLIER = 2_654_435_761  # Knuth's: spreads the prompt over the vocabulary


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """The work of a canary and its period."""

    period_s: float  # from one end to the next start, if the worker is idle
    max_step_tokens: int
    num_tokens: int  # sampled tokens; 1 on a prefill worker, as for a request


class Canary:
    """Call ``step`` while the engine has no other work."""

    def __init__(self, plan: CanaryPlan, leader: Leader, blocks: BlockManager, clock: Clock) -> None:
        """The first canary is due at once: the earlier the first answer, the less time for something to break before it."""
        self._plan = plan
        self._leader = leader
        self._blocks = blocks
        self._clock = clock
        card = leader.engine.card
        num_prompt_tokens = min(_PROMPT_TOKENS, plan.max_step_tokens, card.max_model_len - plan.num_tokens)
        self._prompt = [(index + 1) * _MULTIPLIER % card.vocab_size for index in range(num_prompt_tokens)]
        self._first: bytes | None = None
        self._due_s = clock()
        self._sequence: Sequence | None = None  # set while a canary is unfinished
        self._tokens: list[SampledToken] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a canary has begun and is unfinished."""
        return self._sequence is not None

    def step(self) -> bool | None:
        """Run a step of the canary, if it has begun or is due. After the last: whether the answer is the first one; else None.

        Begins only if half of the pool's blocks stay allocatable. Raises the engine's exceptions; the canary is then over.
        """
        if self._sequence is None and (self._clock() < self._due_s or not self._begin()):
            return None
        try:
            if not self._compute():
                return None
            digest = self._digest()
        except Exception:
            self._due_s = self._clock() + self._plan.period_s
            self.abandon()
            raise
        self._due_s = self._clock() + self._plan.period_s
        self.abandon()
        self._first = self._first or digest
        return digest == self._first

    def abandon(self) -> None:
        """Release the canary's blocks. An unfinished canary starts again at the next ``step``."""
        if self._sequence is not None:
            self._sequence.set_status(SequenceStatus.FINISHED)
            self._blocks.release(sequence_owner(self._sequence.key))
            self._sequence = None

    def _begin(self) -> bool:
        num_blocks = self._blocks.num_blocks_for(len(self._prompt) + self._plan.num_tokens)
        sequence = Sequence(
            request_id="canary of this worker",  # unlike every request id, it has spaces
            attempt=0,
            token_ids=list(self._prompt),
            num_prompt_tokens=len(self._prompt),
            sampling=SamplingParams(max_tokens=self._plan.num_tokens, temperature=0.0, num_logprobs=_NUM_LOGPROBS),
            arrival_s=self._clock(),
        )
        spare = self._blocks.num_blocks // 2
        allocation = self._blocks.allocate(sequence_owner(sequence.key), num_blocks, spare=spare, is_whole=True)
        if allocation is None:
            return False
        sequence.block_tables = allocation.block_tables
        sequence.set_status(SequenceStatus.RUNNING)
        self._sequence, self._tokens = sequence, []
        store = self._leader.engine.store
        for group, block_ids in enumerate(sequence.block_tables):
            for block_id in block_ids:
                store.open_write(block_id, group)[:] = bytes(store.block_nbytes)
                store.close_write(block_id)
        return True

    def _compute(self) -> bool:
        """Run one step. True if it was the last."""
        assert self._sequence is not None, "a canary that has not begun has no step"
        sequence = self._sequence
        row = StepRow(sequence, sequence.num_uncomputed_tokens)
        (result,) = self._leader.step([row])
        (token,) = result.tokens
        sequence.num_computed_tokens += row.num_tokens
        sequence.token_ids.append(token.token_id)
        self._tokens.append(token)
        return len(self._tokens) == self._plan.num_tokens

    def _digest(self) -> bytes:
        assert self._sequence is not None, "a canary that is over has no blocks"
        digest, store = xxhash.xxh3_128(), self._leader.engine.store
        for token in self._tokens:
            pairs = [
                (token.token_id, token.logprob),
                *(token.top_logprobs or ()),
            ]
            for token_id, logprob in pairs:
                digest.update(struct.pack("<qd", token_id, 0.0 if logprob is None else logprob))
        geometry = self._leader.engine.card.layout.geometry
        for group, block_ids in enumerate(self._sequence.block_tables):
            # A small group leaves the end of a physical block unused, with arbitrary bytes.
            nbytes = geometry.block_size * geometry.groups[group].token_nbytes
            for block_id in block_ids:
                content = store.open_read(block_id, group)
                try:
                    if not isinstance(content, memoryview):
                        late = content.wait(_Reader(), _READ_S)
                        if late is None:
                            raise TimeoutError(f"block {block_id} did not come from the device in {_READ_S:g} s")
                        content = late
                    digest.update(content[:nbytes])
                finally:
                    store.close_read(block_id)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Implements :class:`kvrelay.common.late_bytes.Reader`. The block is closed only after it is read."""

    is_done: bool = False
