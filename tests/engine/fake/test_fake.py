"""The fake engine: right tokens for right blocks, and an error for any wrong block."""

from __future__ import annotations

import pytest

from kvrelay.common.images import ImageSpan
from kvrelay.engine.fake.engine import FakeEngine, KvMismatchError, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from tests.engine.conftest import sequence, tokens
from tests.engine.led import step


def run(engine: FakeEngine, row: Sequence, count: int) -> int | None:
    (result,) = step(engine, [StepRow(row, count)])
    row.num_computed_tokens += count
    if result is None:
        return None
    row.token_ids.append(result.token_id)
    return result.token_id


def ship(source: FakeEngine, target: FakeEngine, blocks: list[int], places: list[int]) -> None:
    for ours, theirs in zip(blocks, places, strict=True):
        target.store.open_write(theirs)[:] = source.store.open_read(ours)
        source.store.close_read(ours)
        target.store.close_write(theirs)


def test_every_kind_of_wrong_block_is_found() -> None:
    source = FakeEngine(fake_card())
    row = sequence(tokens(4, 12), [0, 1, 2])
    run(source, row, 12)

    def decode(target: FakeEngine, position: int) -> None:
        moved = sequence(row.token_ids, [10, 11, 12, 13])
        moved.num_computed_tokens = 12
        with pytest.raises(KvMismatchError, match=f"K/V of position {position} "):
            run(target, moved, 1)

    missing = FakeEngine(fake_card())
    ship(source, missing, [0, 2], [10, 12])
    decode(missing, 4)
    swapped = FakeEngine(fake_card())
    ship(source, swapped, [0, 1, 2], [10, 12, 11])
    decode(swapped, 4)
    stale = FakeEngine(fake_card())
    run(stale, sequence(tokens(5, 12), [10, 11, 12]), 12)
    ship(source, stale, [0, 1], [10, 11])
    decode(stale, 8)
    flipped = FakeEngine(fake_card())
    ship(source, flipped, [0, 1, 2], [10, 11, 12])
    flipped.store.open_write(12)[-1] ^= 1
    decode(flipped, 11)


def test_a_chunk_that_does_not_sample_is_not_read_back() -> None:
    engine = FakeEngine(fake_card())
    row = sequence(tokens(6, 8), [1, 2])
    row.num_computed_tokens = 4  # wrong: nothing was computed
    assert run(engine, row, 2) is None
    with pytest.raises(KvMismatchError, match="position 0"):
        run(engine, row, 2)


def test_rows_that_do_not_fit_are_refused() -> None:
    engine = FakeEngine(fake_card())
    with pytest.raises(ValueError, match="2 blocks do not hold 9 tokens"):
        step(engine, [StepRow(sequence([1] * 9, [1, 2]), 9)])
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"no {count} tokens behind 0"):
            step(engine, [StepRow(sequence([1] * 4, [1, 2]), count)])


def test_reading_back_once_still_finds_what_a_hand_off_got_wrong() -> None:
    source, target = FakeEngine(fake_card()), FakeEngine(fake_card(), reads_back_once=True)
    row = sequence(tokens(5, 9), [0, 1, 2])
    run(source, row, 9)
    moved = sequence(row.token_ids, [10, 11, 12])
    moved.num_computed_tokens = 9
    ship(source, target, [0, 1, 2], [10, 12, 11])
    with pytest.raises(KvMismatchError, match="position 4 "):
        run(target, moved, 1)


def test_reading_back_once_starts_over_with_another_block_table() -> None:
    engine = FakeEngine(fake_card(), reads_back_once=True)
    row = sequence(tokens(6, 6), [0, 1, 2])
    expected = expected_output(row.token_ids, 3, engine.card.vocab_size)
    assert [run(engine, row, 6), run(engine, row, 1)] == expected[:2]
    row.block_tables[0][0] = 30  # as after a preemption, but block 30 was not computed
    with pytest.raises(KvMismatchError, match="position 0 "):
        run(engine, row, 1)


def test_no_stop_token_before_min_tokens() -> None:
    prompt = tokens(9, 6)
    usual = expected_output(prompt, 4, 1000)
    row = sequence(prompt, [0, 1, 2, 3], min_tokens=2, stop_token_ids=(usual[0], 3))
    engine = FakeEngine(fake_card())
    first = run(engine, row, 6)
    assert first not in (usual[0], 3)
    unbound = sequence(prompt, [4, 5, 6], min_tokens=0, stop_token_ids=(usual[0],))
    assert run(engine, unbound, 6) == usual[0]
    everything = sequence(prompt, [7, 8, 9], min_tokens=2, stop_token_ids=tuple(range(1000)))
    assert run(engine, everything, 6) in range(1000)


def test_log_probabilities_are_made_up_and_the_same_everywhere() -> None:
    prompt = tokens(10, 9)

    def outcome(*chunks: int) -> Sequence:
        engine = FakeEngine(fake_card())
        row = sequence(prompt, [0, 1, 2], num_prompt_logprobs=3, num_logprobs=2)
        for count in chunks:
            run(engine, row, count)
        return row

    whole = outcome(9)
    assert whole.prompt_logprobs == outcome(2, 1, 6).prompt_logprobs
    assert [token.token_id for token in whole.prompt_logprobs] == prompt[1:]
    for token in whole.prompt_logprobs:
        values = [value for _, value in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token.logprob == dict(token.top_logprobs).get(token.token_id, token.logprob)
    row = sequence(prompt, [0, 1, 2], num_logprobs=2)
    (sampled,) = step(FakeEngine(fake_card()), [StepRow(row, 9)])
    assert sampled is not None
    assert sampled.top_logprobs[0] == (sampled.token_id, sampled.logprob)  # the greedy token is the likeliest
    assert row.prompt_logprobs == []


SPAN = ImageSpan(2, 6, bytes(16))


def imaged(*, is_read: bool = True, position_offset: int = -3, span: ImageSpan = SPAN) -> Sequence:
    """A sequence with an image, and its blocks."""
    made = sequence(list(range(8)), [0, 1, 2])
    made.spans, made.position_offset = (span,), position_offset
    made.images = ReadImages((span,), ()) if is_read else None
    return made


def test_a_token_depends_on_the_images_before_it() -> None:
    other = ImageSpan(2, 6, bytes(range(16)))
    outputs = []
    for span in (SPAN, SPAN, other):
        outputs.append(run(FakeEngine(fake_card()), imaged(span=span), 8))
        assert [outputs[-1]] == expected_output(range(8), 1, 1000, images=[span])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("made", "num_tokens", "problem"),
    [
        (imaged(is_read=False), 8, "images that were not read"),
        (imaged(position_offset=0), 8, "off by 0, not -3"),
        (imaged(), 4, "a part of an image"),
    ],
)
def test_what_images_lack_is_noticed(made: Sequence, num_tokens: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        run(FakeEngine(fake_card(), has_whole_images=True), made, num_tokens)
