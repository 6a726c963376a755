"""Images in plans and batches: what a join brings, rotary positions, and how far tokens see."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.common.images import ImageSpan
from kvrelay.engine.images.interface import Numbers, ReadImages
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.step.slots import Slots
from tests.engine.conftest import sequence, tokens

BLOCK_SIZE = 4
SPANS = (ImageSpan(2, 6, b"1" * 16), ImageSpan(8, 11, b"2" * 16))
NUM_TOKENS, OFFSET = 14, -3
POSITIONS = np.stack(  # two axes; behind the last image both go on together
    [
        [0, 1, 2, 2, 2, 2, 4, 5, 6, 6, 6, 8, 9, 10],
        [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 6, 8, 9, 10],
    ]
).astype(np.int64)


def images(*, has_positions: bool = True, takes_whole: bool = False) -> ReadImages:
    positions = Numbers("int64", POSITIONS.shape, POSITIONS.tobytes()) if has_positions else None
    return ReadImages(SPANS, ({}, {}), positions, OFFSET if has_positions else 0, takes_whole)


def pictured(read: ReadImages | None, start: int = 0, offset: int = 0) -> Sequence:
    one = sequence(tokens(NUM_TOKENS, NUM_TOKENS), list(range(8)))
    one.images, one.num_computed_tokens = read, start
    one.position_offset = offset if read is None else read.position_offset
    return one


def batch_of(*rows: StepRow) -> Batch:
    slots = Slots(len(rows), 8)
    plan = Planner(len(rows), 2**16).plan(sorted(rows, key=lambda row: row.num_tokens > 1))
    slots.apply(plan)
    return build_batch(plan, slots, BLOCK_SIZE)


def test_a_step_without_images_has_nothing_of_them() -> None:
    batch = batch_of(StepRow(pictured(None), 5), StepRow(pictured(None, 13), 1))
    assert batch.rotary_positions is None
    assert batch.last_seen is None


def test_positions_of_images_stand_beside_plain_ones() -> None:
    batch = batch_of(StepRow(pictured(None), 3), StepRow(pictured(images(), 4), 6), StepRow(pictured(None, 13, 7), 1))
    assert batch.rotary_positions is not None
    assert batch.rotary_positions[:, 0].tolist() == [20, 20]
    assert batch.rotary_positions[:, 1:4].tolist() == [[0, 1, 2]] * 2
    assert batch.rotary_positions[:, 4:].tolist() == POSITIONS[:, 4:10].tolist()
    assert batch.positions[4:].tolist() == list(range(4, 10))


def test_an_offset_alone_gives_one_axis() -> None:
    batch = batch_of(StepRow(pictured(None, 13, OFFSET), 1), StepRow(pictured(None), 2))
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == [[13 + OFFSET, 0, 1]]


def test_a_prompt_whose_images_are_computed_joins_with_its_offset_only() -> None:
    for start, brings in ((0, True), (10, True), (11, False)):
        (join,) = Planner(1, 2**16).plan([StepRow(pictured(images(), start), 2)]).joins
        assert (join.images is not None) == brings
        assert join.position_offset == OFFSET
    batch = batch_of(StepRow(pictured(images(), 11), 3))
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == POSITIONS[:1, 11:].tolist()


def test_a_prompt_that_computes_cached_images_after_all_gets_them() -> None:
    """It lost its blocks, and kept its slot."""
    planner, slots, one = Planner(1, 2**16), Slots(1, 8), pictured(images(), 11)
    one.spans = SPANS
    slots.apply(planner.plan([StepRow(one, 3)]))
    one.num_computed_tokens = NUM_TOKENS
    one.token_ids.append(5)
    plan = planner.plan([StepRow(one, 1)])
    assert not plan.joins
    slots.apply(plan)
    one.num_computed_tokens = 4
    plan = planner.plan([StepRow(one, 6)])
    [join] = plan.joins
    assert join.images is not None
    slots.apply(plan)
    batch = build_batch(plan, slots, BLOCK_SIZE)
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == POSITIONS[:, 4:10].tolist()
    one.num_computed_tokens = 10
    assert not planner.plan([StepRow(one, 5)]).joins


def test_images_that_did_not_come_are_not_computed_as_text() -> None:
    one = pictured(None, 10)
    one.spans = SPANS
    with pytest.raises(ValueError, match="computes from token 10 on; its images up to 11 did not come with it"):
        batch_of(StepRow(one, 4))
    one.num_computed_tokens = 11
    batch_of(StepRow(one, 3))


def test_output_follows_the_prompt_with_the_offset() -> None:
    planner, slots, one = Planner(1, 2**16), Slots(1, 8), pictured(images())
    slots.apply(planner.plan([StepRow(one, NUM_TOKENS)]))
    one.num_computed_tokens = NUM_TOKENS
    one.token_ids.append(5)
    plan = planner.plan([StepRow(one, 1)])
    slots.apply(plan)
    batch = build_batch(plan, slots, BLOCK_SIZE)
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == [[NUM_TOKENS + OFFSET]] * 2


def test_tokens_of_an_image_see_its_last_one() -> None:
    read = images(has_positions=False, takes_whole=True)
    batch = batch_of(StepRow(pictured(None), 4), StepRow(pictured(read, 3), 9))
    assert batch.rotary_positions is None
    assert batch.last_seen is not None
    assert batch.last_seen.tolist() == [0, 1, 2, 3, 5, 5, 5, 6, 7, 10, 10, 10, 11]


def test_only_images_that_need_it_are_taken_whole() -> None:
    assert batch_of(StepRow(pictured(images(has_positions=False)), 9)).last_seen is None
    with pytest.raises(ValueError, match="a row ends at 9, inside the image at 8 to 11, whose tokens see each other"):
        batch_of(StepRow(pictured(images(has_positions=False, takes_whole=True)), 9))
