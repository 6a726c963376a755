"""Tokens of an image see each other as transformers lets them: with and without windows, over all operations.

Images are ordinary tokens here that transformers is told to be images, so no encoder is needed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots

from .test_types import saved
from .tiny import VOCAB, WINDOW

BLOCK_SIZE, NUM_BLOCKS = 8, 6
# (first token, end) of each image; the second one is longer than a window.
IMAGES = [(2, 7), (12, 12 + 2 * WINDOW), (35, 41)]
CUTS = [0, 9, 45]  # tokens in each step
PROMPT = [5 * place % VOCAB for place in range(CUTS[-1])]


def steps(num_groups: int) -> list[Batch]:
    """The prompt's steps. Its images see themselves."""
    slots, last_seen = Slots(1, NUM_BLOCKS, num_groups), np.arange(len(PROMPT))
    for first, end in IMAGES:
        last_seen[first:end] = end - 1
    join = SlotJoin(0, "a", tuple(PROMPT), len(PROMPT), SamplingParams(max_tokens=1))
    tables = [
        TableDelta(0, 0, tuple(range(group * NUM_BLOCKS, (group + 1) * NUM_BLOCKS)), group)
        for group in range(num_groups)
    ]
    batches = []
    for start, end in itertools.pairwise(CUTS):
        joins, deltas = ((join,), tuple(tables)) if start == 0 else ((), ())
        plan = StepPlan(rows=(PlanRow(0, start, end - start),), joins=joins, tables=deltas)
        slots.apply(plan)
        batches.append(replace(build_batch(plan, slots, BLOCK_SIZE), last_seen=last_seen[start:end]))
    return batches


@pytest.mark.timeout(180)  # the interpreter takes a quarter of a minute on a quiet machine
@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_tokens_of_an_image_see_each_other_as_in_transformers(model_type: str, kernels: str, tmp_path: Path) -> None:
    changes = {"use_bidirectional_attention": "vision"} if model_type == "gemma4" else {}
    full = saved(model_type, tmp_path, **changes)
    types = torch.zeros(1, len(PROMPT), dtype=torch.long)
    for first, end in IMAGES:
        types[0, first:end] = 1
    told = {"mm_token_type_ids" if model_type == "gemma4" else "token_type_ids": types}
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        causal, expected = full(prompt).logits[0], full(prompt, **told).logits[0]
    assert (causal - expected).abs().max() > 0.1, "the images do not matter"

    device = torch.device("cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu")
    model = load_model(tmp_path, torch.float32, device)
    geometry = geometry_of(model.shape, BLOCK_SIZE, torch.float32)
    pool = KvPool(geometry, NUM_BLOCKS * len(geometry.groups), device)
    ops = (
        CpuPagedOps(model.shape, pool.tensor)
        if kernels == "torch"
        else CudaPagedOps(model.shape, pool.tensor, NUM_BLOCKS * BLOCK_SIZE, 1)
    )
    model.bind(ops, torch.float32)
    found = []
    with torch.inference_mode():
        for batch in steps(len(geometry.groups)):
            (token_ids,) = ops.upload((batch.token_ids,))
            found.append(model.logits(model.forward(token_ids, ops.begin_step(batch))).cpu())
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-4, rtol=2e-4)
