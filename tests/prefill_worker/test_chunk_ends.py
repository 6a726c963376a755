"""Where chunks of prompts end, also with images that must be computed whole."""

from __future__ import annotations

import random

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.chunk_ends import ChunkEnds
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.scheduling.choice import EVERYBODY, Choice
from kvrelay.worker.scheduling.whole_images import chunk, first_end, last_end, longest_chunk, num_together

SPANS = (ImageSpan(10, 26, b""), ImageSpan(26, 30, b""), ImageSpan(70, 71, b""))


@pytest.mark.parametrize(
    ("start", "end", "unit", "last", "first"),
    [
        (0, 10, 1, 10, 1),
        (0, 20, 1, 10, 1),  # it ends before the image
        (10, 20, 1, 10, 26),  # nothing of the image, or all of it
        (10, 29, 1, 26, 26),
        (20, 25, 1, 20, 26),  # the image's first tokens are cached
        (27, 29, 1, 27, 30),
        (30, 50, 1, 50, 31),
        (0, 40, 16, 32, 32),  # 16 is inside an image
        (0, 30, 16, 0, 32),
        (32, 90, 16, 80, 48),
        (80, 95, 16, 95, 95),  # the last token
    ],
)
def test_a_chunk_does_not_end_inside_an_image(start: int, end: int, unit: int, last: int, first: int) -> None:
    assert last_end(SPANS, start, end, 95, unit) == last
    assert first_end(SPANS, start, 95, unit) == first


def test_the_longest_chunk_that_images_ask_for() -> None:
    assert longest_chunk(SPANS, 95) == 16
    assert longest_chunk(SPANS, 95, 16) == 32
    assert longest_chunk((), 95) == 0
    assert longest_chunk([ImageSpan(20, 95, b"")], 95, 16) == 79


@pytest.mark.parametrize(
    ("start", "share", "unit", "together", "most"),
    [
        (0, 20, 1, 0, 10),
        (10, 12, 1, 16, 16),
        (10, 0, 1, 16, 16),
        (26, 3, 1, 4, 4),
        (30, 20, 1, 0, 20),
        (0, 30, 16, 32, 32),
        (32, 20, 16, 0, 16),
        (32, 15, 16, 0, 0),  # no image takes it further
    ],
)
def test_a_chunk_gets_larger_than_its_share_only_for_an_image(
    start: int, share: int, unit: int, together: int, most: int
) -> None:
    assert num_together(SPANS, start, 95, unit) == together
    assert chunk(SPANS, start, share, 95, None, unit) == chunk(SPANS, start, share, 95, together, unit) == most
    if most > share:
        assert chunk(SPANS, start, share, 95, together - 1, unit) == 0


def test_a_prompt_that_must_go_on_waits_if_there_is_no_room_for_its_image() -> None:
    """With states, where chunks end with blocks."""
    ends, prompt = ChunkEnds(16, 64, has_states=True), imaged_prompt(random.Random(0), "r")
    prompt.token_ids, prompt.spans, prompt.has_whole_images = [1] * 95, SPANS, True
    assert ends.num_together(prompt, 0) == 32
    assert ends.num_together(prompt, 32) == 0
    assert ends.num_tokens(prompt, 0, 16, 31, must=True) == 0
    assert ends.num_tokens(prompt, 0, 16, 32, must=True) == 32
    assert ends.num_tokens(prompt, 32, 15, 64, must=True) == 16
    assert ends.num_tokens(prompt, 32, 15, 64, must=False) == 0


@pytest.mark.parametrize("seed", range(60))
def test_random_prompts_with_whole_images_are_computed_in_steps_that_an_engine_can_take(seed: int) -> None:
    """No chunk ends inside an image, no step has more tokens than the most, and every prompt is computed."""
    draws = random.Random(seed)
    most, has_states = draws.choice((32, 48, 64)), draws.random() < 0.3
    windows = (None,) if has_states or draws.random() < 0.5 else (None, draws.choice((4, 16, 40)))
    settings = PrefillSchedulerSettings(max_batched_tokens=most, ttft_budget_ms=draws.choice((0.0, 50.0)))
    blocks = BlockManager(
        512 * len(windows), 4, lambda: 0.0, windows=windows, max_step_tokens=most, has_states=has_states
    )
    num_stages = draws.choice((1, 1, 2))
    scheduler = PrefillScheduler(settings, blocks, 2048, "cpu", num_stages)
    prompts: list[Sequence] = []
    unit = 4 if has_states else 1
    while len(prompts) < 12:
        prompt = imaged_prompt(draws, f"r{len(prompts)}")
        if longest_chunk(prompt.spans, prompt.num_tokens, unit) <= most:
            prompts.append(prompt)
    for prompt in prompts[:4]:
        scheduler.add(prompt)
    waiting, flying, now_s = prompts[4:], list[list[StepRow]](), 0.0
    for _ in range(2000):
        if waiting and draws.random() < 0.3:
            scheduler.add(waiting.pop(0))
        now_s += 0.01
        choice = Choice(flying=[row for rows in flying for row in rows]) if flying else EVERYBODY
        plan = scheduler.schedule(now_s, choice)
        assert sum(row.num_tokens for row in plan.rows) <= most
        for row in plan.rows:
            end = row.sequence.num_computed_tokens + row.num_ahead + row.num_tokens
            assert not any(span.start < end < span.stop for span in row.sequence.spans), (end, row.sequence.spans)
            assert not has_states or end % 4 == 0 or end == row.sequence.num_tokens
            assert row.sequence.num_blocks * 4 >= end
        if plan.rows:
            flying.append(plan.rows)
        assert flying or waiting or not (scheduler.running or scheduler.waiting), "a prompt is stuck"
        if flying and (len(flying) == num_stages or not plan.rows):
            rows = flying.pop(0)
            scheduler.observe(rows, 0.001 * sum(row.num_tokens for row in rows))
            results = [
                RowResult((SampledToken(1),) if row.sequence.num_uncomputed_tokens == row.num_tokens else ())
                for row in rows
            ]
            for row, new in zip(rows, scheduler.postprocess(rows, results), strict=True):
                if new.token is not None:
                    blocks.release(sequence_owner(row.sequence.key))
        scheduler.check_integrity()
        if not (flying or waiting or scheduler.running or scheduler.waiting):
            break
    assert all(prompt.num_computed_tokens == prompt.num_prompt_tokens for prompt in prompts)


def imaged_prompt(draws: random.Random, name: str) -> Sequence:
    """A random prompt with images, which must be computed whole. Some begin alike, also with parts of images."""
    spans, token_ids = [], []
    for _ in range(draws.randint(0, 4)):
        token_ids += [1] * draws.choice((0, 1, 5, 30))
        start = len(token_ids)
        token_ids += [2] * draws.choice((1, 3, 17, 24))
        spans.append(ImageSpan(start, len(token_ids), bytes([draws.randrange(2)]) * 16))
    token_ids += [1] * draws.randint(1, 40)
    chain = HashChain(b"model", 4, images=spans)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    made = Sequence(name, 1, token_ids, len(token_ids), params, 0.0, chain=chain)
    made.spans, made.has_whole_images = spans, True
    return made
