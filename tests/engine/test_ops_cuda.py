"""The GPU's operations, run by Triton's interpreter on the CPU: the model and the sampler must not see a difference.

In a process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import transformers

from tests.engine.conftest import SIZES, save_model

SCRIPT = """
import sys
from pathlib import Path

import torch

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.engine import torch_engine
from kvrelay.engine.interface import StepRow
from kvrelay.engine.ops_cuda import CudaOps
from kvrelay.engine.sequence import Sequence

options = torch_engine.EngineOptions(Path(sys.argv[1]), "tiny", device="cpu", num_blocks=32, max_num_seqs=4)


def outputs():
    engine = torch_engine.TorchEngine.load(options, lambda done, total: None)
    rows = []
    for index, length in enumerate((1, 37, 20)):
        sampling = SamplingParams(
            max_tokens=99, seed=index, num_logprobs=199, temperature=index / 2, top_k=50, top_p=0.9, presence_penalty=0.2,
            typical_p=(0.5, 1.0, 0.8)[index], logit_bias=((5 + index, 2.0),), bad_words=((7,), (1, 2)), min_tokens=index,
            stop_token_ids=(9,), watermark=Watermark() if index == 1 else None, num_prompt_logprobs=3,
        )
        blocks = [9 * index + place for place in range(6)]
        tokens = [(7 * index + 3 * place) % 199 for place in range(length)]
        rows.append(Sequence(str(index), 1, tokens, length, sampling, 0.0, block_table=blocks))
    for _ in range(3):
        step = [(row, min(25, row.num_uncomputed_tokens)) for row in rows]
        for (row, count), token in zip(step, engine.step([StepRow(*item) for item in step])):
            row.num_computed_tokens += count
            if token is not None:
                row.token_ids.append(token.token_id)
                logprobs = dict(token.top_logprobs)
                assert len(row.prompt_logprobs) == row.num_prompt_tokens - 1
                yield token.token_id, [logprobs[token_id] for token_id in range(199)]


expected = list(outputs())
torch_engine._ops = lambda config, pool, length, seqs: CudaOps(config, pool, length, seqs)
given = list(outputs())
assert [token for token, _ in given] == [token for token, _ in expected], (given, expected)
difference = max(
    (torch.tensor(ours) - torch.tensor(theirs)).abs().max().item()
    for (_, ours), (_, theirs) in zip(given, expected, strict=True)
)
assert difference < 2e-4, difference
print("same", len(given), difference)
"""


def test_kernels_and_cpu_agree(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.Qwen3Config(**SIZES))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("same 8 ")
