"""The block tables on a GPU, updated by their changes. Without a GPU they are in host memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.config.model import load_config
from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.slots import Slots
from tests.engine.conftest import sequence

BLOCK_SIZE, MAX_BLOCKS, NUM_SLOTS = 4, 12, 3


@pytest.mark.parametrize("seed", range(8))
def test_a_step_finds_the_tables_of_its_rows_whatever_was_done_to_them(seed: int, llama: tuple[Path, Any]) -> None:
    draws = random.Random(seed)
    config = replace(load_config(llama[0]), sliding_windows=(None, 8, 8))
    pool = torch.zeros(2, 1, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    ops = CudaOps(config, pool, BLOCK_SIZE * MAX_BLOCKS, NUM_SLOTS)
    planner, slots = Planner(NUM_SLOTS, 90), Slots(NUM_SLOTS, MAX_BLOCKS, 3)
    of_rows = [sequence([1] * 9, [], num_groups=3) for _ in range(5)]  # more than have slots at the same time
    num_unchanged = 0
    for _ in range(60):
        for one in of_rows:
            for group, table in enumerate(one.block_tables):
                if len(table) < 3 or draws.random() < 0.1:
                    kept = table[: draws.choice((MAX_BLOCKS, MAX_BLOCKS, 1, 0))]
                    one.block_tables[group] = (kept + [draws.randrange(99) for _ in range(draws.choice((3, 5)))])[
                        :MAX_BLOCKS
                    ]
        rows = [StepRow(one, draws.choice((1, 7))) for one in draws.sample(of_rows, draws.randint(1, NUM_SLOTS))]
        plan = planner.plan(sorted(rows, key=lambda row: row.num_tokens > 1))
        slots.apply(plan)
        num_unchanged += not plan.tables
        inputs = ops.inputs_of(build_batch(plan, slots, BLOCK_SIZE))
        assert inputs.slots.tolist() == [row.slot for row in plan.rows]
        found = []
        for slot in (row.slot for row in plan.rows):
            counts = slots.num_blocks[:, slot].tolist()
            found.append([slots.block_tables[group, slot, :count].tolist() for group, count in enumerate(counts)])
            assert found[-1] == [ops.block_tables[group, slot, :count].tolist() for group, count in enumerate(counts)]
        assert sorted(found) == sorted(row.sequence.block_tables for row in rows)
    assert num_unchanged > 3
