"""Steps of an engine from rows of sequences, as a scheduler has them. Each engine of a test has one leader."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.slots import Slots
from tests.engine.conftest import sequence

_LEADERS: WeakKeyDictionary[Engine, Leader] = WeakKeyDictionary()


def lead(engine: Engine) -> Leader:
    """The engine's leader, made on first use."""
    if engine not in _LEADERS:
        _LEADERS[engine] = Leader(engine)
    return _LEADERS[engine]


def step(engine: Engine, rows: Seq[StepRow]) -> list[SampledToken | None]:
    """Run a step and return each row's token, or None. Appends prompt log probabilities to the sequences."""
    results = lead(engine).step(rows)
    for row, result in zip(rows, results, strict=True):
        row.sequence.prompt_logprobs += result.prompt_logprobs
    return tokens_of(results)


def tokens_of(results: Seq[RowResult]) -> list[SampledToken | None]:
    """The token of each row, or None."""
    assert all(len(result.tokens) < 2 for result in results)
    return [result.tokens[0] if result.tokens else None for result in results]


def batch_of(rows: Seq[StepRow], block_size: int) -> Batch:
    """The batch that an engine builds from the rows. Rows of a single token come first."""
    slots = Slots(len(rows), max((row.sequence.num_blocks for row in rows), default=0))
    plan = Planner(len(rows), 2**16).plan(sorted(rows, key=lambda row: row.num_tokens > 1))
    slots.apply(plan)
    return build_batch(plan, slots, block_size)


def shuffled_batch(rows: list[tuple[int, int]], block_size: int) -> tuple[Batch, int]:
    """A batch of (computed tokens, tokens of this step) with shuffled blocks, and the number of blocks."""
    num_blocks = sum(-(-(start + count) // block_size) for start, count in rows) + 3
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    steps = []
    for start, count in rows:
        of = sequence([0] * (start + count), [free.pop() for _ in range(-(-(start + count) // block_size))])
        of.num_computed_tokens = start
        steps.append(StepRow(of, count))
    return batch_of(steps, block_size), num_blocks
