"""Helpers for tests of several ranks: a prompt to run, what is compared, the ranks' processes, and time limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.step.interface import Engine, StepRow
from tests.engine.conftest import VOCAB, assert_same_tokens, sequence, tokens
from tests.engine.kv.test_fragments import NUM_BLOCKS
from tests.engine.led import step
from tests.processes import started

# Ranks add the parts of a sum in another order, and each processor in its own: 0.8e-5 with AVX2 and AVX-512, and 2.1e-5 with
# SSE 4.1, for log probabilities down to -13. Sums in bf16 differ by 0.1.
ROUNDING = 6e-5
SOON_S = 60.0  # more than anything that happens by itself takes on a busy machine


def pids(leader: int | None = None) -> list[int]:
    """The process ids of the ranks that ``leader`` started, by default this process, in order of their start."""
    return started("kvrelay.engine.rank_main", leader)


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}, after {SOON_S:g} s"
        time.sleep(0.02)


def expect_signs_within(engine: Any, silent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a rank of this engine is lost when it is silent for ``silent_s``.

    Not before it has loaded: a busy machine may stop a rank that loads for longer than that.
    """
    monkeypatch.setattr("kvrelay.engine.ranks.rank.SILENT_S", silent_s)
    for _ in range(2):  # the next sign of life may still be waited for as long as before, or be taken just now
        for rank in engine._ranks.others:
            rank.num_meetings = -1
        wait_until(lambda: all(rank.num_meetings >= 0 for rank in engine._ranks.others), "no sign of life from a rank")


def expect_what_one_rank_gives(engine: Any, alone: Any, bound: float = ROUNDING) -> None:
    """Compare log probabilities, the card, and blocks that are read, with those of an engine of one rank."""
    asking = {"num_logprobs": VOCAB, "num_prompt_logprobs": 3}
    (ours, result), (theirs, expected) = run(engine, **asking), run(alone, **asking)
    assert_same_tokens([result], [expected], bound)
    assert_same_tokens(ours.prompt_logprobs, theirs.prompt_logprobs, bound)
    assert len(ours.prompt_logprobs) == 44
    assert engine.card == alone.card, "two workers with unequal ranks or stages are not each other's peers"
    for block_id in (5, 9):
        whole = np.frombuffer(engine.store.open_read(block_id, 0).wait(None, 1), dtype=np.float32)
        np.testing.assert_allclose(
            whole, np.frombuffer(alone.store.open_read(block_id, 0), dtype=np.float32), atol=1e-4
        )


def expect_whole_blocks(store: GatheredStore, pools: Sequence[torch.Tensor], layout: KvGeometry) -> None:
    """Each block is written and read by a thread of its own, as by senders and receivers.

    ``pools`` are those behind ``store``, whose steps see the bytes after ``close_write``.
    """
    blocks = np.random.default_rng(1).integers(256, size=(NUM_BLOCKS, layout.physical_nbytes), dtype=np.uint8)
    there = GatheredStore(layout, NUM_BLOCKS, [HostPart(pool.numpy()) for pool in pools])

    def write(block_id: int) -> None:
        store.open_write(block_id, 0)[:] = blocks[block_id].data
        store.close_write(block_id)
        assert (there.gather(block_id, 0) == blocks[block_id]).all()
        assert (store.gather(block_id, 0) == blocks[block_id]).all()

    with ThreadPoolExecutor(NUM_BLOCKS) as threads:
        list(threads.map(write, range(NUM_BLOCKS)))


def expect_errors_of_copies(store: GatheredStore, remote: Any, layout: KvGeometry) -> None:
    """``remote``: a part of ``store`` whose second copy fails. Then its rank is gone."""
    store.gather(0, 0)
    store.open_write(1, 0)[:] = bytes(layout.physical_nbytes)
    with pytest.raises(RuntimeError, match=r"a rank has not copied block 1: .*broken"):
        store.close_write(1)
    remote._link.shut()
    with pytest.raises(RuntimeError, match="a rank is gone, and its part of block 2"):
        store.gather(2, 0)


def run(engine: Engine, **sampling: Any) -> Any:
    """Run a prompt in two chunks. Returns the sequence and its first token."""
    row = sequence(tokens(1, 45), [5, 9, 2, 30], num_groups=len(engine.card.layout.geometry.groups), **sampling)
    step(engine, [StepRow(row, 20)])
    row.num_computed_tokens = 20
    (result,) = step(engine, [StepRow(row, 25)])
    row.num_computed_tokens = 45
    assert result is not None
    return row, result
