"""The GPU's operations decide once for each layer whether prefill attention loads boxes. The interpreter counts the loads.

In a process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.engine.backends.test_ops_cuda import run_interpreted
from tests.engine.conftest import SIZES, save_model

BOXES = """
import sys
from dataclasses import replace
from pathlib import Path

import torch
from triton.runtime import interpreter

from kvrelay.engine.backends.cuda import ops as ops_cuda
from kvrelay.engine.config.model import load_config
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.cuda.inputs import StepInputs

config = replace(load_config(Path(sys.argv[1])), sliding_windows=(None, 30, None))
pool = torch.full((4, 3, 2, config.num_kv_heads, 64, config.head_dim), float("nan"), dtype=torch.float16)
torch.manual_seed(0)
pool[1] = torch.randn(pool[1].shape).half()
pool[3, :, :, :, :36] = torch.randn(3, 2, config.num_kv_heads, 36, config.head_dim).half()
inputs = StepInputs(
    torch.arange(70, 100), torch.arange(70, 100).expand(3, 30), torch.tensor([1]),
    torch.tensor([100], dtype=torch.int32), torch.tensor([0, 30], dtype=torch.int32), 0, 30,
)
query = torch.randn(30, config.num_q_heads, config.head_dim).half()
num_boxes = 0
load = interpreter.InterpreterBuilder.create_descriptor_load


def counted(self, *arguments):
    global num_boxes
    num_boxes += 1
    return load(self, *arguments)


interpreter.InterpreterBuilder.create_descriptor_load = counted
results = {}
for capability in ((8, 0), (9, 0)):
    ops_cuda.nvidia_capability = lambda device: capability
    ops = CudaOps(config, pool, 128, 4)
    # Asked once: what a step does no longer depends on it.
    ops_cuda.nvidia_capability = None
    ops.block_tables[:, 1, :2] = torch.tensor([1, 3])
    step = ops.step_of(inputs)
    for layer in range(3):
        before = num_boxes
        results[capability, layer] = step.attention(query, layer), num_boxes - before
for layer in range(3):
    (by_pointers, none), (by_boxes, some) = results[(8, 0), layer], results[(9, 0), layer]
    assert torch.equal(by_pointers, by_boxes) and not by_boxes.isnan().any(), layer
    # A tile of 64 rows of a group of three begins with its token 0 or 21: one tile of keys is before all of them.
    assert (none, some) == (0, 0 if layer == 1 else 2 * 2 * config.num_kv_heads), (layer, none, some)
print("same")
"""


def test_prefill_loads_boxes_where_it_can(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.Qwen3Config(**SIZES))
    assert run_interpreted(BOXES, tmp_path).startswith("same")
