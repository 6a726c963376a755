"""What an engine computes in one step: an immutable message, which can also be sent to another process.

A plan holds numbers only. The sequences behind it, their guides and their clients stay with the leader
(:mod:`kvrelay.engine.step.planner`). A sequence that computes has a *slot* of the engine, which keeps what the engine needs from
step to step (:mod:`kvrelay.engine.step.slots`). A plan brings only changes since the plan before. An engine must apply all plans,
in order.
"""

from __future__ import annotations

import msgspec

from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.images.interface import ReadImages


class PlanRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot's share of a step: ``num_tokens`` tokens from position ``start`` on, whose K/V are computed.

    The slot knows these tokens by then. With ``is_fed``, only the device knows the last one: the slot's step before, which may
    still run, samples it.

    With ``draft_tokens``, the row's only token is the last of these. They are a guess at the tokens after those that the slot
    knows, and no later plan relies on them. For each earlier guess the slot has another row in the same step, before this row, so
    the K/V of all are there when this row reads them.
    """

    slot: int
    start: int
    num_tokens: int
    new_tokens: tuple[int, ...] = ()  # tokens that the slot's sequence got since the plan before
    is_fed: bool = False
    num_samples: int = 0  # tokens to sample after the last one, 0 or 1
    prompt_logprobs: tuple[int, int] | None = (
        None  # first position, and the one after the last, whose tokens' log probabilities are wanted
    )
    adapter: int = 0  # 0: the plain model
    draft_tokens: tuple[int, ...] = ()


class SlotJoin(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot, replacing the one before. It has no blocks yet."""

    slot: int
    name: str  # for error messages
    token_ids: tuple[int, ...]  # all known tokens, whether their K/V are computed or not
    num_prompt_tokens: int
    sampling: SamplingParams  # without its guide
    images: ReadImages | None = None  # of its prompt, if the engine may have to compute some of their tokens
    position_offset: int = 0  # added to positions behind the prompt in rotary embeddings
    spans: tuple[ImageSpan, ...] = ()  # of its prompt's images, also where the engine need not compute them


class TableDelta(msgspec.Struct, frozen=True, array_like=True):
    """A change of a slot's block table in one group: from ``start`` to its end it is ``block_ids``."""

    slot: int
    start: int
    block_ids: tuple[int, ...]
    group: int = 0


class Rules(msgspec.Struct, frozen=True):
    """Constraints on the next tokens beyond the sampling parameters; the leader computes them from tokens and guides.

    Entries are sparse. ``rows`` index the rows that sample, from 0.
    """

    bias_rows: list[int] = []
    bias_tokens: list[int] = []
    bias_values: list[float] = []
    allowed_rows: list[int] = []  # if a row has entries, only these tokens may come
    allowed_tokens: list[int] = []
    forbidden_rows: list[int] = []
    forbidden_tokens: list[int] = []
    guided_rows: list[int] = []
    bitmask: bytes = b""  # int32 [len(guided_rows), ceil(vocab_size / 32)]: token t has bit t % 32 of word t // 32


class SamplingInputs(msgspec.Struct, frozen=True):
    """The leader's inputs for a step's sampling."""

    rules: Rules | None = None
    # For a deferred step: (slot, tokens that it got since the plan).
    new_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # Rows, indexed as in Rules, whose token does not count because their sequences have ended.
    over: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Rows with a single token come first.

    Changes are applied in this order: ``resets``, ``joins``, ``tables``, the rows' new tokens.
    """

    rows: tuple[PlanRow, ...]
    joins: tuple[SlotJoin, ...] = ()
    leaves: tuple[int, ...] = ()  # slots that have become free
    tables: tuple[TableDelta, ...] = ()
    sampling: SamplingInputs | None = SamplingInputs()  # None: LaunchedStep.sample brings it later
    resets: bool = False  # discard everything known about slots


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """A step's result for a row."""

    tokens: tuple[SampledToken, ...] = ()  # consecutive tokens; none if the row does not sample, several with a draft
    prompt_logprobs: tuple[SampledToken, ...] = ()  # for the positions that the row asked for
