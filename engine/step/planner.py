"""Turns a scheduler's rows into an engine's plan: keeps which sequence has which slot, and what the engine already knows of it.

A sequence keeps its slot until it has finished, or until a step needs the slot for another sequence. Then it joins again later with
all its tokens. No tensors and no engine here: :mod:`kvrelay.engine.step.leader` launches the plans.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import PlanRow, SamplingInputs, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.rules import Asked, has_rules, make_rules, may_have_rules
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class _Held:
    """A slot that a sequence has, and what the engine knows of the sequence."""

    slot: int
    sampling: SamplingParams
    needs_host: bool  # whether its sampling parameters need the host
    is_ruled: bool  # whether they set or forbid tokens, perhaps only for a while
    num_tokens: int
    first_told: int = 0  # the engine has what tokens from here on take of their images
    block_tables: list[list[int]] = field(default_factory=list)

    def learn(self, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that the engine does not know yet; they count as sent."""
        assert self.num_tokens <= sequence.num_tokens, (
            f"{sequence.key}: {sequence.num_tokens} tokens, and had {self.num_tokens}"
        )
        new_tokens = tuple(sequence.token_ids[self.num_tokens :])
        self.num_tokens = sequence.num_tokens
        return new_tokens


class Planner:
    """The state behind a series of plans for one engine. Use it on the model thread only."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """``num_slots``: of the engine; also the most rows of a step. ``vocab_size``: for guides' masks."""
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._held: dict[Sequence, _Held] = {}
        self._free: list[int] = []
        self._resets = True
        self.reset()

    def reset(self) -> None:
        """The engine's knowledge is no longer certain: the next plan sends everything."""
        self._held.clear()
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._resets = True

    def slot_of(self, sequence: Sequence) -> int | None:
        """The sequence's slot; None if it has none."""
        held = self._held.get(sequence)
        return None if held is None else held.slot

    def plan(self, rows: Seq[StepRow], in_front: Collection[Sequence] | None = None) -> StepPlan:
        """The plan of ``rows``, rows with a single token first.

        A row with a draft becomes several rows of the plan, one per token. ``in_front``: the sequences whose tokens the running
        step samples; None: no step runs. Rules that depend on those tokens are left to ``sampling_inputs``. Raises ValueError if
        there are more rows than slots, a row is ahead without a running step, or a draft does not follow a last token. After an
        error, call ``reset``.
        """
        leaves = [self._give_back(one) for one in [one for one in self._held if one.status is SequenceStatus.FINISHED]]
        joins: list[SlotJoin] = []
        tables: list[TableDelta] = []
        planned: list[PlanRow] = []
        needs_host = is_ruled = False
        for row in rows:
            sequence, num_tokens, num_ahead = row.sequence, row.num_tokens, row.num_ahead
            held = self._held.get(sequence)
            new_tokens: tuple[int, ...] = ()
            # Same as StepRow.is_fed and .samples, inlined because two calls per row count here.
            num_left = len(sequence.token_ids) - sequence.num_computed_tokens - num_ahead
            is_fed = num_ahead > 0 and num_left == 0
            if is_fed:
                _require_fed(row, held is not None and in_front is not None and sequence in in_front)
            is_new = held is None or held.sampling is not sequence.sampling
            # It lost its blocks, and computes images that were cached when it joined.
            if held is None or is_new or sequence.num_computed_tokens < held.first_told:
                held = self._join(sequence, rows, joins)
            elif held.num_tokens != len(sequence.token_ids):
                new_tokens = held.learn(sequence)
            # Lists of identical int objects compare fast, and most tables have not changed.
            if held.block_tables != sequence.block_tables:
                tables += _deltas(held, sequence.block_tables)
            samples = is_fed or num_tokens == num_left
            if samples:
                needs_host = needs_host or held.needs_host or sequence.guide is not None
                is_ruled = is_ruled or (held.is_ruled and has_rules(sequence, int(is_fed)))
            planned.append(
                PlanRow(
                    held.slot,
                    sequence.num_computed_tokens + num_ahead,
                    num_tokens,
                    new_tokens,
                    is_fed,
                    int(samples),
                    None if held.sampling.num_prompt_logprobs is None else _prompt_positions(row),
                    sequence.adapter,
                )
            )
            if row.draft:
                planned += _drafted(row, planned[-1])
        sampling: SamplingInputs | None = SamplingInputs()
        if needs_host and in_front is not None:
            sampling = None
        elif needs_host or is_ruled:
            asking = [Asked(row.sequence, int(row.is_fed), row.draft) for row in rows if row.samples]
            sampling = SamplingInputs(make_rules(asking, self._vocab_size))
        resets, self._resets = self._resets, False
        return StepPlan(tuple(planned), tuple(joins), tuple(leaves), tuple(tables), sampling, resets)

    def sampling_inputs(self, samples: Mapping[Sequence, int]) -> SamplingInputs:
        """The inputs that a deferred step, which samples for these sequences in order, still needs.

        The sequences have the tokens of the step in front by now: the given number in all, unless they are finished. The guide of a
        finished one is not asked.
        """
        over: list[int] = []
        new_tokens: list[tuple[int, tuple[int, ...]]] = []
        asking: list[Asked] = []
        for place, (sequence, count) in enumerate(samples.items()):
            if sequence.status is SequenceStatus.FINISHED:
                over.append(place)
                asking.append(Asked(None))
                continue
            held = self._held[sequence]
            if held.num_tokens != count:
                new_tokens.append((held.slot, held.learn(sequence)))
            asking.append(Asked(sequence))
        return SamplingInputs(make_rules(asking, self._vocab_size), tuple(new_tokens), tuple(over))

    def _join(self, sequence: Sequence, rows: Seq[StepRow], joins: list[SlotJoin]) -> _Held:
        held = self._held.pop(sequence, None)
        if held is not None:
            slot = held.slot
        else:
            if not self._free:
                self._take_back(rows)
            slot = self._free.pop()
        sampling = sequence.sampling
        is_ruled = may_have_rules(sampling)
        held = _Held(slot, sampling, sequence.needs_host_to_sample, is_ruled, len(sequence.token_ids))
        self._held[sequence] = held
        name = f"{sequence.request_id}/{sequence.attempt}" + (f"#{sequence.beam}" if sequence.beam else "")
        if sampling.guide is not None:
            sampling = msgspec.structs.replace(sampling, guide=None)
        images = sequence.images
        # Behind the last image the offset alone gives the positions.
        if images is not None and all(span.stop <= sequence.num_computed_tokens for span in images.spans):
            held.first_told = max((span.stop for span in images.spans), default=0)
            images = None
        joins.append(
            SlotJoin(
                slot,
                name,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sampling,
                images=images,
                position_offset=sequence.position_offset,
                spans=tuple(sequence.spans),
            )
        )
        return held

    def _take_back(self, rows: Seq[StepRow]) -> None:
        """Free the slot of a sequence that is not in the step."""
        in_step = {row.sequence for row in rows}
        other = next((one for one in self._held if one not in in_step), None)
        if other is None:
            raise ValueError(f"a step of {len(rows)} rows; the engine has {self._num_slots} slots")
        self._give_back(other)

    def _give_back(self, sequence: Sequence) -> int:
        slot = self._held.pop(sequence).slot
        self._free.append(slot)
        return slot


def _require_fed(row: StepRow, is_fed: bool) -> None:
    """Raise ValueError unless the row's only input token is one that the running step samples."""
    if row.num_tokens != 1 or not is_fed:
        raise ValueError(
            f"sequence {row.sequence.key}: a row of {row.num_tokens} tokens, {row.num_ahead} ahead; only one token can follow "
            "one that the step under way samples"
        )


def _drafted(row: StepRow, planned: PlanRow) -> list[PlanRow]:
    """The rows of a row's draft, after that of its own token. Raises ValueError if that is not the sequence's last token."""
    if planned.is_fed or planned.num_tokens != 1 or not planned.num_samples:
        raise ValueError(f"sequence {row.sequence.key}: a draft behind {planned}, which is not the last token alone")
    ends = range(1, len(row.draft) + 1)
    return [
        PlanRow(
            planned.slot,
            planned.start + end,
            1,
            num_samples=1,
            adapter=planned.adapter,
            draft_tokens=row.draft[:end],
        )
        for end in ends
    ]


def _deltas(held: _Held, block_tables: list[list[int]]) -> Iterator[TableDelta]:
    """The changes of a sequence's tables; they count as sent."""
    if not held.block_tables:
        held.block_tables = [[] for _ in block_tables]
    for group, (known, block_table) in enumerate(zip(held.block_tables, block_tables, strict=True)):
        if known == block_table:
            continue
        start = min(len(known), len(block_table))
        if known[:start] != block_table[:start]:
            start = next(index for index in range(start) if known[index] != block_table[index])
        known[start:] = block_table[start:]
        yield TableDelta(held.slot, start, tuple(block_table[start:]), group)


def _prompt_positions(row: StepRow) -> tuple[int, int] | None:
    """The prompt positions that the row's tokens predict and whose log probabilities are still missing."""
    sequence = row.sequence
    first = len(sequence.prompt_logprobs) + 1
    if first >= sequence.num_prompt_tokens:
        return None
    assert sequence.num_computed_tokens < first, (
        f"{sequence.key}: has log probabilities up to {first - 1}, computes from {sequence.num_computed_tokens}"
    )
    stop = min(sequence.num_computed_tokens + 1 + row.num_tokens, sequence.num_prompt_tokens)
    return (first, stop) if first < stop else None
