"""The numbers of a step, against the same numbers counted one token at a time."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.interface import StepRow
from tests.engine.conftest import sequence, tokens


def row(start: int, count: int, total: int, blocks: list[int]) -> StepRow:
    of = sequence(tokens(total, total), blocks)
    of.num_computed_tokens = start
    return StepRow(of, count)


def test_a_batch_by_hand() -> None:
    long, short = row(3, 4, 9, [7, 2]), row(5, 1, 6, [4, 6])
    batch = build_batch([long, short], 4)
    assert (batch.rows, batch.order) == ([short, long], [1, 0])
    assert batch.token_ids.tolist() == [short.sequence.token_ids[5], *long.sequence.token_ids[3:7]]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6]
    assert batch.slot_mapping.tolist() == [6 * 4 + 1, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    assert batch.query_start_loc.tolist() == [0, 1, 5]
    assert batch.seq_lens.tolist() == [6, 7]
    assert batch.block_tables.tolist() == [[4, 6], [7, 2]]
    assert (batch.num_decode_rows, batch.max_query_len, batch.sampling_rows) == (1, 4, [0])


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
    batch = build_batch(rows, block_size)
    assert sorted(batch.order) == list(range(len(rows)))
    assert all(batch.rows[place] is rows[index] for place, index in enumerate(batch.order))
    place = 0
    for index, packed in enumerate(batch.rows):
        of, first = packed.sequence, packed.sequence.num_computed_tokens
        assert batch.query_start_loc[index] == place
        assert batch.seq_lens[index] == first + packed.num_tokens
        for position in range(first, first + packed.num_tokens):
            assert batch.token_ids[place] == of.token_ids[position]
            assert batch.positions[place] == position
            slot = of.block_table[position // block_size] * block_size + position % block_size
            assert batch.slot_mapping[place] == slot
            place += 1
        num_blocks = -(-int(batch.seq_lens[index]) // block_size)
        assert batch.block_tables[index, :num_blocks].tolist() == of.block_table[:num_blocks]
        assert (index in batch.sampling_rows) == (batch.seq_lens[index] == of.num_tokens) == packed.samples
        assert (index < batch.num_decode_rows) == (packed.num_tokens == 1)
    assert batch.query_start_loc[-1] == place == len(batch.token_ids)
    assert batch.block_tables.shape[1] == -(-int(batch.seq_lens.max()) // block_size)
    assert batch.max_query_len == max(packed.num_tokens for packed in rows)


@pytest.mark.parametrize(
    "table",
    [[1000, 2000, 3000, 4000, 5000], [1000, 7000, 3000, 4000], [7000, 8000, 9000]],
    ids=["longer", "a block replaced", "others, and fewer"],
)
def test_a_step_reads_the_blocks_that_the_table_has_then(table: list[int]) -> None:
    """Whatever was done to the list since the last step."""
    of = row(8, 1, 9, [1000, 2000, 3000, 4000])
    build_batch([of], 4)
    of.sequence.block_table[:] = table
    assert build_batch([of], 4).block_tables.tolist() == [table[:3]]


def test_a_table_that_has_not_changed_is_not_read_again() -> None:
    of = sequence([1], [1000, 2000])
    known = of.block_ids()
    of.block_table = [1000, 2000]
    assert of.block_ids() is known


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
        build_batch([row(0, 3, 3, [5]), wrong], 4)
