"""The GPU's operations let tokens of an image see each other as the CPU's do, and upload what they see with a step's other numbers.

In a process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.engine.backends.test_ops_cuda import run_interpreted
from tests.engine.conftest import SIZES, save_model

IMAGES = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.config.model import load_config
from kvrelay.engine.step import uploads
from tests.engine.led import shuffled_batch
from tests.last_seen import with_images

config = replace(load_config(Path(sys.argv[1])), sliding_windows=(None,) * 3)
rows = [(30, 1), (0, 1), (20, 45), (0, 33)]
batch, num_blocks = shuffled_batch(rows, 16)
batch = with_images(batch, seed=1, longest=30)
torch.manual_seed(0)
pool = torch.randn(num_blocks, 3, 2, config.num_kv_heads, 16, config.head_dim)
query = torch.randn(len(batch.positions), config.num_q_heads, config.head_dim)
num_uploads, upload = 0, uploads.Uploader.upload


def counted(self, *arguments):
    global num_uploads
    num_uploads += 1
    return upload(self, *arguments)


uploads.Uploader.upload = counted
found = {}
for window in (None, 12):
    for only_windows in (False, True):
        shape = replace(config, sliding_windows=(window,) * 3, sees_ahead_in_windows_only=only_windows)
        ours, reference = CudaPagedOps(shape, pool, 128, 4), CpuPagedOps(shape, pool)
        before = num_uploads
        step = ours.begin_step(batch)
        assert num_uploads == before + 2, "the tables' changes, and everything else"
        found[window, only_windows] = step.attention(query, 1)
        expected = reference.begin_step(batch).attention(query, 1)
        torch.testing.assert_close(found[window, only_windows], expected, rtol=1e-4, atol=1e-4)
causal = CpuPagedOps(config, pool).begin_step(replace(batch, last_seen=None)).attention(query, 1)
torch.testing.assert_close(found[None, True], causal, rtol=1e-4, atol=1e-4)
assert (found[None, False] - causal).abs().max() > 0.1
assert torch.equal(found[12, True], found[12, False])
print("same")
"""


def test_images_see_themselves_as_on_a_cpu(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.Qwen3Config(**SIZES))
    assert run_interpreted(IMAGES, tmp_path).startswith("same")
