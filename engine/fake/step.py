"""A fake engine's slots, and a step of it between its launch and ``wait``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.step.plan import PlanRow, RowResult, SamplingInputs, StepPlan


@dataclass(slots=True)
class Memory:
    """What earlier steps found out about a sequence. Tokens are only ever appended to a sequence."""

    digests: bytearray  # digests of its leading tokens, 8 bytes each
    verified_blocks: list[list[int]]  # by group: its leading blocks when positions were last read back
    num_verified: int = 0  # number of those positions that are still valid


@dataclass(slots=True, eq=False)
class FakeSequence:
    """The sequence in a slot."""

    name: str
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: list[list[int]]  # by group
    spans: tuple[ImageSpan, ...] = ()  # of its images
    images: ReadImages | None = None
    position_offset: int = 0
    memory: Memory = field(default_factory=lambda: Memory(bytearray(), []))

    @property
    def num_output_tokens(self) -> int:
        """Output so far, that of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    def copy(self, draft: tuple[int, ...] = ()) -> FakeSequence:
        """The current state with a shared memory, for a row that is computed later, when the slot may hold another sequence.

        With a ``draft`` after its tokens it is another sequence, with its own memory.
        """
        memory = self.memory
        if draft:
            memory = Memory(bytearray(memory.digests), memory.verified_blocks, memory.num_verified)
        return FakeSequence(
            self.name,
            [*self.token_ids, *draft],
            self.num_prompt_tokens,
            self.sampling,
            [list(table) for table in self.block_tables],
            self.spans,
            self.images,
            self.position_offset,
            memory,
        )


class FakeSlots:
    """All slots of a fake engine, by number."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self.sequences: dict[int, FakeSequence] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes."""
        if plan.resets:
            self.sequences.clear()
        for slot in plan.leaves:
            del self.sequences[slot]
        for join in plan.joins:
            self.sequences[join.slot] = FakeSequence(
                join.name,
                list(join.token_ids),
                join.num_prompt_tokens,
                join.sampling,
                [[] for _ in range(self._num_groups)],
                join.spans,
                join.images,
                join.position_offset,
            )
        for delta in plan.tables:
            self.sequences[delta.slot].block_tables[delta.group][delta.start :] = delta.block_ids
        self.learn((row.slot, row.new_tokens) for row in plan.rows)

    def learn(self, new_tokens: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Append new tokens, given as (slot, tokens)."""
        for slot, tokens in new_tokens:
            self.sequences[slot].token_ids.extend(tokens)


@dataclass(frozen=True, slots=True)
class Share:
    """One row at its launch."""

    sequence: FakeSequence
    row: PlanRow

    @property
    def num_tokens(self) -> int:
        """Tokens of the row in this step."""
        return self.row.num_tokens


Compute = Callable[[Sequence[Share], SamplingInputs], list[RowResult]]
"""Computes all shares of a step."""


class FakeStep:
    """Implements :class:`kvrelay.engine.step.interface.LaunchedStep`. It computes in ``wait``."""

    def __init__(
        self,
        compute: Compute,
        shares: list[Share],
        inputs: SamplingInputs | None,
        slots: FakeSlots,
        behind: FakeStep | None,
    ) -> None:
        self._compute = compute
        self._shares = shares
        self._inputs = inputs
        self._slots = slots
        self._behind = behind
        self._tokens: dict[int, int] = {}  # by slot
        self._is_over = False

    @property
    def is_deferred(self) -> bool:
        """See LaunchedStep."""
        return self._inputs is None

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        assert self.is_deferred, "a step samples once"
        self._slots.learn(inputs.new_tokens)
        self._inputs = inputs

    def wait(self) -> list[RowResult]:
        """See LaunchedStep."""
        assert self._inputs is not None, "a step that was not told to sample yields no tokens"
        assert not self._is_over, "a step computes once, also if it fails"
        self._is_over = True
        for share in self._shares:
            if share.row.is_fed:
                token_id = None if self._behind is None else self._behind._tokens.get(share.row.slot)
                assert token_id is not None, (
                    f"{share.sequence.name}: a row is fed, and no step before it sampled its token"
                )
                share.sequence.token_ids.append(token_id)
        results = self._compute(self._shares, self._inputs)
        self._tokens = {
            share.row.slot: result.tokens[-1].token_id
            for share, result in zip(self._shares, results, strict=True)
            if result.tokens
        }
        self._behind = None
        return results
