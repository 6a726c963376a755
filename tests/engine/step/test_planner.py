"""A planner tells an engine everything about a sequence once, then only changes, and always enough."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.engine.step.slots import NOBODY, PENALTIES, RANDOM, Slots
from tests.engine.conftest import sequence

VOCAB = 90


def computed(of: Sequence, *new_tokens: int) -> StepRow:
    """A row of the last token, after ``new_tokens`` were added."""
    of.token_ids += new_tokens
    of.num_computed_tokens = of.num_tokens - 1
    return StepRow(of, 1)


def test_what_is_known_is_not_told_again() -> None:
    planner, one = Planner(2, VOCAB), sequence([1, 2, 3], [7, 8])
    first = planner.plan([StepRow(one, 3)])
    assert (first.resets, [join.token_ids for join in first.joins]) == (True, [(1, 2, 3)])
    assert [(delta.start, delta.block_ids) for delta in first.tables] == [(0, (7, 8))]
    assert first.rows[0].new_tokens == ()
    second = planner.plan([computed(one, 4)])
    assert (second.resets, second.joins, second.tables, second.leaves) == (False, (), (), ())
    assert [(row.start, row.num_tokens, row.new_tokens) for row in second.rows] == [(3, 1, (4,))]
    ahead = planner.plan([StepRow(one, 1, num_ahead=1)], [one])
    assert [(row.start, row.new_tokens, row.is_fed) for row in ahead.rows] == [(4, (), True)]


@pytest.mark.parametrize(
    ("table", "start", "told"),
    [
        ([1000, 2000, 3000, 4000, 5000], 4, (5000,)),
        ([1000, 7000, 3000, 4000], 1, (7000, 3000, 4000)),
        ([7000, 8000], 0, (7000, 8000)),
        ([1000, 2000], 2, ()),
    ],
    ids=["longer", "a block replaced", "others, and fewer", "shorter"],
)
def test_a_table_is_told_from_where_it_differs(table: list[int], start: int, told: tuple[int, ...]) -> None:
    planner, slots, one = Planner(1, VOCAB), Slots(1, 5), sequence([1], [1000, 2000, 3000, 4000])
    slots.apply(planner.plan([StepRow(one, 1)]))
    one.block_tables[0][:] = table
    plan = planner.plan([StepRow(one, 1)])
    assert [(delta.start, delta.block_ids) for delta in plan.tables] == [(start, told)]
    slots.apply(plan)
    assert slots.block_tables[0].tolist() == [table + [0] * (5 - len(table))]


def test_slots_are_given_on_and_their_sequences_join_again() -> None:
    planner = Planner(2, VOCAB)
    one, two, three = (sequence([number], []) for number in range(3))
    slots = {one: planner.plan([StepRow(one, 1)]).rows[0].slot}
    slots[two] = planner.plan([StepRow(two, 1)]).rows[0].slot
    assert sorted(slots.values()) == [0, 1]
    one.set_status(SequenceStatus.FINISHED)
    assert planner.plan([StepRow(two, 1)]).leaves == (slots[one],)
    assert planner.plan([StepRow(three, 1)]).rows[0].slot == slots[one]
    # No sequence has finished, so one that is not in the step loses its slot.
    four = sequence([4, 5], [])
    plan = planner.plan([StepRow(three, 1), StepRow(four, 2)])
    assert [(join.slot, join.token_ids) for join in plan.joins] == [(slots[two], (4, 5))]
    back = planner.plan([StepRow(two, 1)])
    assert [join.token_ids for join in back.joins] == [(1,)]
    with pytest.raises(ValueError, match="a step of 3 rows; the engine has 2 slots"):
        planner.plan([StepRow(row, 1) for row in (two, three, sequence([9], []))])


def test_after_a_reset_everything_is_told_again() -> None:
    planner, one = Planner(1, VOCAB), sequence([1, 2], [7])
    planner.plan([StepRow(one, 2)])
    planner.reset()
    plan = planner.plan([computed(one, 3)])
    assert (plan.resets, [join.token_ids for join in plan.joins], len(plan.tables)) == (True, [(1, 2, 3)], 1)
    planner.reset()
    with pytest.raises(ValueError, match="only one token can follow"):  # a reset forgets that it was sampled
        planner.plan([StepRow(one, 1, num_ahead=1)], [one])


def test_guides_stay_here_and_other_parameters_join_anew() -> None:
    guide = Guide(kind=GuideKind.REGEX, text="a")
    planner, one = Planner(1, VOCAB), sequence([1], [], guide=guide, top_k=3)
    (join,) = planner.plan([StepRow(one, 1)]).joins
    assert (join.sampling.guide, join.sampling.top_k) == (None, 3)
    one.sampling = msgspec.structs.replace(one.sampling, top_k=4)
    (join,) = planner.plan([StepRow(one, 1)]).joins
    assert join.sampling.top_k == 4


def test_tokens_are_never_taken_back() -> None:
    planner, one = Planner(1, VOCAB), sequence([1, 2], [])
    planner.plan([StepRow(one, 2)])
    one.token_ids.pop()
    with pytest.raises(AssertionError, match="1 tokens, and had 2"):
        planner.plan([StepRow(one, 1)])


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_knows_of_every_row_what_its_sequence_is(seed: int) -> None:
    """Sequences change and finish at random, and slots change owners. The engine's copy always equals the sequence."""
    draws = random.Random(seed)
    num_slots = draws.randint(1, 6)
    planner, slots = Planner(num_slots, VOCAB), Slots(num_slots, 12, 2)
    alive: list[Sequence] = []
    for _ in range(150):
        if draws.random() < 0.3:
            sampling = {"temperature": draws.choice((0.0, 0.7)), "presence_penalty": draws.choice((0.0, 0.5))}
            alive.append(
                sequence([draws.randrange(VOCAB) for _ in range(draws.randint(1, 9))], [], num_groups=2, **sampling)
            )
        if alive and draws.random() < 0.2:
            alive.pop(draws.randrange(len(alive))).set_status(SequenceStatus.FINISHED)
        for one in alive:
            one.token_ids += [draws.randrange(VOCAB) for _ in range(draws.choice((0, 1, 1, 3)))]
            for group in (group for group in range(2) if draws.random() < 0.5):
                kept = one.block_tables[group][: draws.choice((12, 12, 2, 0))]
                one.block_tables[group] = (kept + [draws.randrange(9) for _ in range(draws.choice((0, 1, 5)))])[:12]
        if draws.random() < 0.05:
            planner.reset()
        rows = [computed(one) for one in draws.sample(alive, min(len(alive), draws.randint(1, num_slots)))]
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(planner.plan(rows)), type=StepPlan)
        slots.apply(plan)
        assert len({row.slot for row in plan.rows}) == len(rows)
        for row, planned in zip(rows, plan.rows, strict=True):
            of, known = row.sequence, slots.sequences[planned.slot]
            assert (known.token_ids, known.num_prompt_tokens, known.sampling) == (
                of.token_ids,
                of.num_prompt_tokens,
                of.sampling,
            )
            for table, its in zip(slots.block_tables[:, planned.slot].tolist(), of.block_tables, strict=True):
                assert table == its + [0] * (12 - len(its))
            asks = RANDOM * (of.sampling.temperature > 0) | PENALTIES * (of.sampling.presence_penalty > 0)
            assert slots.asks[planned.slot] == asks
        assert sum(one is not NOBODY for one in slots.sequences) >= len(rows)
