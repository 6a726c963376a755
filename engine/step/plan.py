"""What an engine computes in one step: an immutable message, which another process could take as well.

A plan holds numbers only. The sequences that it stands for, their guides and their clients stay with the leader
(:mod:`kvrelay.engine.step.planner`). A sequence that computes has a *slot* of the engine: what the engine needs of it from step to
step lies there (:mod:`kvrelay.engine.step.slots`), and a plan brings only what has changed since the plan before.

An engine takes plans in the order in which they were made, and leaves none out.
"""

from __future__ import annotations

import msgspec

from kvrelay.common.sampling import SampledToken, SamplingParams


class PlanRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot's share of a step: ``num_tokens`` tokens from position ``start`` on, whose K/V are computed.

    They are tokens that the slot knows by then. With ``is_fed`` the last one is known to the device only: it is the one that the
    slot's step before sampled, which may still run.

    With ``draft_tokens`` the row's only token is the last of these: they are a guess at what comes behind the tokens that the slot
    knows, and no later plan counts on them. The slot has a row for each earlier one in the same step, in front of this row, and so
    their K/V are there when this row reads them.
    """

    slot: int
    start: int
    num_tokens: int
    new_tokens: tuple[int, ...] = ()  # what the slot's sequence got since the plan before
    is_fed: bool = False
    num_samples: int = 0  # how many tokens are sampled behind the last one, 0 or 1
    prompt_logprobs: tuple[int, int] | None = (
        None  # the positions, first and past the last, whose tokens' are asked for
    )
    adapter: int = 0  # 0: the model as it is
    draft_tokens: tuple[int, ...] = ()


class SlotJoin(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot, in the place of whatever was there; it has no blocks yet."""

    slot: int
    name: str  # for people
    token_ids: tuple[int, ...]  # all that are known, whether their K/V are computed or not
    num_prompt_tokens: int
    sampling: SamplingParams  # without its guide


class TableDelta(msgspec.Struct, frozen=True, array_like=True):
    """A slot's block table of one group: from ``start`` on, and to its end, it is ``block_ids``."""

    slot: int
    start: int
    block_ids: tuple[int, ...]
    group: int = 0


class Rules(msgspec.Struct, frozen=True):
    """What may come next, beyond what the sampling parameters tell the engine; computed by the leader from tokens and guides.

    Entries are sparse. ``rows`` count the rows that sample, from 0.
    """

    bias_rows: list[int] = []
    bias_tokens: list[int] = []
    bias_values: list[float] = []
    allowed_rows: list[int] = []  # where there is an entry of a row, none but such tokens may come
    allowed_tokens: list[int] = []
    forbidden_rows: list[int] = []
    forbidden_tokens: list[int] = []
    guided_rows: list[int] = []
    bitmask: bytes = b""  # int32 [len(guided_rows), ceil(vocab_size / 32)]: token t has bit t % 32 of word t // 32


class SamplingInputs(msgspec.Struct, frozen=True):
    """What a step's sampling needs of the leader."""

    rules: Rules | None = None
    new_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()  # of a deferred step: (slot, what it got since the plan)
    over: tuple[int, ...] = ()  # rows, counted as in Rules, whose token means nothing: their sequences have ended


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Rows of a single token come first.

    The order of application: ``resets``, ``joins``, ``tables``, the rows' new tokens.
    """

    rows: tuple[PlanRow, ...]
    joins: tuple[SlotJoin, ...] = ()
    leaves: tuple[int, ...] = ()  # slots that nobody has any more
    tables: tuple[TableDelta, ...] = ()
    sampling: SamplingInputs | None = SamplingInputs()  # None: it is told later (LaunchedStep.sample)
    resets: bool = False  # whatever the engine knew of slots no longer holds


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step yields for a row."""

    tokens: tuple[SampledToken, ...] = ()  # one behind the other; none if the row samples none, several with a draft
    prompt_logprobs: tuple[SampledToken, ...] = ()  # of the positions that the row asked for
