"""The real engine over a pool whose blocks arrive by late copies: steps wait for the copies, or give no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.sampling import SampledToken
from kvrelay.engine import pool_and_card
from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine

from .. import led
from ..conftest import load, sequence, tokens
from ..late_device import LateDevice

PROMPT = tokens(1, 45)
THEIRS = [40, 41, 42]
STAGING_NBYTES = 5 * 3 * 2 * 2 * 16 * 16 * 4  # five blocks


class Reader:
    is_done = False


@pytest.fixture
def staged(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an engine whose pool the host reaches only by staging."""

    def make(device: LateDevice, **options: Any) -> TorchEngine:
        def pool(*args: Any, **options: Any) -> KvPool:
            return KvPool(*args, **{**options, "staging": StagingPlan(device, STAGING_NBYTES)})

        with monkeypatch.context() as patched:
            patched.setattr(pool_and_card, "KvPool", pool)
            return load(llama[0], **options)

    return make


def computed(llama: tuple[Path, Any]) -> tuple[list[SampledToken], Any, list[bytes]]:
    """From an engine without staging: two tokens after the prompt, the sequence, and the bytes of the prompt's three
    blocks."""
    engine = load(llama[0])
    row = sequence(PROMPT, [5, 9, 2, 30], num_logprobs=3)
    (first,) = step(engine, row, 45)
    blocks = [bytes(engine.store.open_read(block, 0)) for block in (5, 9, 2)]  # type: ignore[arg-type]
    row.token_ids.append(first.token_id)
    (second,) = step(engine, row, 1)
    return [first, second], row, blocks


def step(engine: TorchEngine, row: Sequence, count: int) -> list[SampledToken]:
    found = led.step(engine, [StepRow(row, count)])
    row.num_computed_tokens += count
    assert all(found)
    return found  # type: ignore[return-value]


def received(engine: TorchEngine, blocks: list[bytes]) -> Sequence:
    """A sequence whose prompt was computed elsewhere and whose blocks have been received."""
    for block_id, content in zip(THEIRS, blocks, strict=True):
        engine.store.open_write(block_id, 0)[:] = content
        engine.store.close_write(block_id)
    row = sequence(PROMPT, [*THEIRS, 43], num_logprobs=3)
    row.num_computed_tokens = len(PROMPT)
    return row


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_step_reads_blocks_that_have_come(llama: tuple[Path, Any], staged: Any, seed: int | None) -> None:
    (first, second), _, blocks = computed(llama)
    device = LateDevice(None if seed is None else random.Random(seed))
    engine = staged(device)
    row = received(engine, blocks)
    row.token_ids.append(first.token_id)
    assert device.num_launched == len(blocks)
    assert step(engine, row, 1) == [second]


def test_a_step_behind_another_one_reads_blocks_that_came_meanwhile(llama: tuple[Path, Any], staged: Any) -> None:
    (first, second), _, blocks = computed(llama)
    engine = staged(LateDevice(), run_ahead="on")
    other = sequence(tokens(2, 20), [0, 1])
    step(engine, other, 20)
    other.token_ids.append(7)
    launched = led.lead(engine).launch([StepRow(other, 1)])
    row = received(engine, blocks)
    row.token_ids.append(first.token_id)
    behind = led.lead(engine).launch([StepRow(other, 1, num_ahead=1), StepRow(row, 1)], launched)
    launched.wait()
    (found,) = behind.wait()[1].tokens
    # A batch of two rounds differently from a batch of one.
    assert (found.token_id, found.logprob) == (second.token_id, pytest.approx(second.logprob, abs=1e-4))


def test_blocks_that_have_come_are_copied_within_the_pool(llama: tuple[Path, Any], staged: Any) -> None:
    (first, second), _, blocks = computed(llama)
    engine = staged(LateDevice())
    row = received(engine, blocks)
    engine.copy_blocks([(42, 50)])
    row.block_tables[0][2] = 50
    row.token_ids.append(first.token_id)
    assert step(engine, row, 1) == [second]


def test_what_a_step_computed_is_shipped(llama: tuple[Path, Any], staged: Any) -> None:
    _, _, blocks = computed(llama)
    engine = staged(LateDevice())
    step(engine, sequence(PROMPT, [5, 9, 2, 30]), 45)
    reads = [engine.store.open_read(block, 0) for block in (5, 9, 2)]
    assert [bytes(read.wait(Reader(), 30.0)) for read in reads] == blocks


def test_a_failed_copy_leads_to_no_token(llama: tuple[Path, Any], staged: Any) -> None:
    (first, _), _, blocks = computed(llama)
    engine = staged(LateDevice(fails_at=2))
    row = received(engine, blocks)
    row.token_ids.append(first.token_id)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the device is broken"):
            led.step(engine, [StepRow(row, 1)])


def test_a_copy_that_fails_while_the_step_runs_leads_to_no_token(llama: tuple[Path, Any], staged: Any) -> None:
    (first, _), _, blocks = computed(llama)
    engine = staged(LateDevice(fails_at=3))
    row = received(engine, blocks)
    row.token_ids.append(first.token_id)
    launched = led.lead(engine).launch([StepRow(row, 1)])
    with pytest.raises(RuntimeError, match="the device is broken"):
        launched.wait()
