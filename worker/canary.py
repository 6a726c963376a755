"""The canary: an idle worker computes a known prompt again and again, and compares the result with its first one.

A step computes the prompt, further ones a token each: greedy, of the base model, without a draft. What is digested is every byte
of K/V that they wrote, in all groups of layers and of all ranks, and the tokens with the bits of their log probabilities. So a
wrong bit shows in whatever these steps read and write; not one in the embedding of another token, or in an expert that none of
these tokens goes to. A processor's rounding is its own: the first answer of this process is what later ones are compared with.
The steps have the same shape each time, so that they round alike.

The canary has blocks of its own: it neither looks in the prefix cache nor publishes there. They are zeroed first. So bytes that
no layer writes are the same each time. Whoever has work for the engine calls ``abandon`` first. So a request waits for at most one
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
_READ_S = 10.0  # for a block's bytes to come from a device
_MULTIPLIER = 2_654_435_761  # Knuth's: spreads the prompt over the vocabulary


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """The work of a canary and its period."""

    period_s: float  # between two ends of it, if the worker is idle
    max_step_tokens: int
    num_tokens: int  # sampled; 1: what a prefill worker does for a request


class Canary:
    """``step`` it while the engine has nothing else to do."""

    def __init__(self, plan: CanaryPlan, leader: Leader, blocks: BlockManager, clock: Clock) -> None:
        """Due at once: the sooner the first answer, the less has had time to go wrong."""
        self._plan = plan
        self._leader = leader
        self._blocks = blocks
        self._clock = clock
        card = leader.engine.card
        num_prompt_tokens = min(_PROMPT_TOKENS, plan.max_step_tokens, card.max_model_len - plan.num_tokens)
        self._prompt = [(index + 1) * _MULTIPLIER % card.vocab_size for index in range(num_prompt_tokens)]
        self._first: bytes | None = None
        self._due_s = clock()
        self._sequence: Sequence | None = None  # while it is computed
        self._tokens: list[SampledToken] = []

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and is not over."""
        return self._sequence is not None

    def step(self) -> bool | None:
        """Begin if it is due, or go on, by one step. None unless it ends with that: then whether the answer is the first one's.

        Nothing happens while half of the pool's blocks are in use. Raises what the engine raises, then it is over.
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
        """Release its blocks. An unfinished canary begins anew at the next ``step``."""
        if self._sequence is not None:
            self._sequence.set_status(SequenceStatus.FINISHED)
            self._blocks.release(sequence_owner(self._sequence.key))
            self._sequence = None

    def _begin(self) -> bool:
        num_blocks = self._blocks.num_blocks_for(len(self._prompt) + self._plan.num_tokens)
        sequence = Sequence(
            request_id="canary of this worker",  # no request's: those have no spaces
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
        """One step; True if it was the last one."""
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
            # A small group leaves a physical block's end unused, which may read as anything.
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
    """Implements :class:`kvrelay.common.late_bytes.Reader`. The block is closed when it is read, and not before."""

    is_done: bool = False
