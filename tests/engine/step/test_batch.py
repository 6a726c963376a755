"""The arrays of a step, against arrays computed one token at a time."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.slots import Slots
from tests.engine.conftest import sequence, tokens
from tests.engine.led import batch_of


def row(start: int, count: int, total: int, blocks: list[int]) -> StepRow:
    of = sequence(tokens(total, total), blocks)
    of.num_computed_tokens = start
    return StepRow(of, count)


def test_a_batch_by_hand() -> None:
    long, short = row(3, 4, 9, [7, 2]), row(5, 1, 6, [4, 6])
    batch = batch_of([long, short], 4)
    assert batch.token_ids.tolist() == [short.sequence.token_ids[5], *long.sequence.token_ids[3:7]]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6]
    assert batch.slot_mapping[0].tolist() == [6 * 4 + 1, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    assert batch.query_start_loc.tolist() == [0, 1, 5]
    assert batch.seq_lens.tolist() == [6, 7]
    assert batch.block_tables().tolist() == [[4, 6], [7, 2]]
    assert (batch.num_decode_rows, batch.max_query_len, batch.sampling_rows.tolist()) == (1, 4, [0])


@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int) -> None:
    generator = random.Random(seed)
    block_size = generator.choice((1, 3, 16))
    free = list(range(2000))
    generator.shuffle(free)
    rows = []
    for _ in range(generator.randrange(1, 20)):
        start, count = generator.randrange(50), generator.choice((1, 1, generator.randrange(1, 40)))
        num_blocks = -(-(start + count) // block_size) + generator.randrange(3)
        total = start + count + generator.choice((0, 5))
        rows.append(row(start, count, total, [free.pop() for _ in range(num_blocks)]))
    batch = batch_of(rows, block_size)
    place = 0
    for index, packed in enumerate(sorted(rows, key=lambda packed: packed.num_tokens > 1)):
        of, first = packed.sequence, packed.sequence.num_computed_tokens
        assert batch.query_start_loc[index] == place
        assert batch.seq_lens[index] == first + packed.num_tokens
        for position in range(first, first + packed.num_tokens):
            assert batch.token_ids[place] == of.token_ids[position]
            assert batch.positions[place] == position
            slot = of.block_tables[0][position // block_size] * block_size + position % block_size
            assert batch.slot_mapping[0, place] == slot
            place += 1
        num_blocks = -(-int(batch.seq_lens[index]) // block_size)
        assert batch.block_tables()[index, :num_blocks].tolist() == of.block_tables[0][:num_blocks]
        assert (index in batch.sampling_rows) == (batch.seq_lens[index] == of.num_tokens) == packed.samples
        assert (index < batch.num_decode_rows) == (packed.num_tokens == 1)
    assert batch.query_start_loc[-1] == place == len(batch.token_ids)
    assert batch.block_tables().shape[1] == -(-int(batch.seq_lens.max()) // block_size)
    assert batch.max_query_len == max(packed.num_tokens for packed in rows)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row(0, 0, 5, [1, 2]), "0 tokens behind 0"),
        (row(0, 9, 9, [1, 2]), "9 tokens behind 0 do not fit 2 blocks of 4"),
        (row(8, 1, 9, [1, 2]), "1 tokens behind 8 do not fit 2 blocks of 4"),
        (row(2, 4, 5, [1, 2]), "4 tokens behind 2 do not fit .* its 5 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused(wrong: StepRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of([row(0, 3, 3, [5]), wrong], 4)


def test_rows_of_a_single_token_come_first_and_only_they_are_fed() -> None:
    long, short = row(0, 3, 9, [1]), row(5, 1, 6, [4, 6])
    slots, planner = Slots(2, 2), Planner(2, 9)
    plan = planner.plan([long, short])
    slots.apply(plan)
    with pytest.raises(ValueError, match=r"rows of \[3, 1\] tokens: those of one come first"):
        build_batch(plan, slots, 4)
    fed = msgspec.structs.replace(plan, rows=(msgspec.structs.replace(plan.rows[0], is_fed=True),))
    with pytest.raises(ValueError, match="only they may be fed"):
        build_batch(fed, slots, 4)
