"""The GPU's operations, in Triton's interpreter on the CPU, give the model and the sampler the CPU's results.

In a process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.conftest import SIZES, save_model

SCRIPT = """
import sys
from pathlib import Path

import torch

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.engine import torch_engine
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.step.sequence import Sequence

options = EngineOptions(Path(sys.argv[1]), "tiny", device="cpu", num_blocks=32, max_num_seqs=4)


def outputs():
    engine = torch_engine.TorchEngine.load(options, lambda done, total: None)
    leader, rows, num_groups = Leader(engine), [], len(engine.card.layout.geometry.groups)
    for index, length in enumerate((1, 37, 20)):
        sampling = SamplingParams(
            max_tokens=99, seed=index, num_logprobs=199, temperature=index / 2, top_k=50, top_p=0.9, presence_penalty=0.2,
            typical_p=(0.5, 1.0, 0.8)[index], logit_bias=((5 + index, 2.0),), bad_words=((7,), (1, 2)), min_tokens=index,
            stop_token_ids=(9,), watermark=Watermark() if index == 1 else None, num_prompt_logprobs=3,
        )
        blocks = [9 * index + place for place in range(6)]
        tokens = [(7 * index + 3 * place) % 199 for place in range(length)]
        tables = [[block * num_groups + group for block in blocks] for group in range(num_groups)]
        rows.append(Sequence(str(index), 1, tokens, length, sampling, 0.0, block_tables=tables))
    for _ in range(3):
        step = [(row, min(25, row.num_uncomputed_tokens)) for row in rows]
        for (row, count), result in zip(step, leader.step([StepRow(*item) for item in step])):
            row.num_computed_tokens += count
            row.prompt_logprobs += result.prompt_logprobs
            for token in result.tokens:
                row.token_ids.append(token.token_id)
                logprobs = dict(token.top_logprobs)
                assert len(row.prompt_logprobs) == row.num_prompt_tokens - 1
                yield token.token_id, [logprobs[token_id] for token_id in range(199)]


expected = list(outputs())
made = []


def cuda_ops(options, config, pool, max_model_len):
    made.append(CudaOps(config, pool, max_model_len, options.max_num_seqs))
    return made[-1]


torch_engine.cpu_ops = cuda_ops
given = list(outputs())
assert len(made) == 1, "these were not the GPU's operations"
assert [token for token, _ in given] == [token for token, _ in expected], (given, expected)
difference = max(
    (torch.tensor(ours) - torch.tensor(theirs)).abs().max().item()
    for (_, ours), (_, theirs) in zip(given, expected, strict=True)
)
assert difference < 2e-4, difference
print("same", len(given), difference)
"""

GRAPHS = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine import pool_and_card, torch_engine
from kvrelay.engine.step import uploads
from kvrelay.engine.backends.cuda.build import decode_graphs, trial_model
from kvrelay.engine.backends.cuda.trial import compile_sampling, compile_steps, run_largest_step
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.config.model import load_config
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.weights.checkpoint import load_weights

NUM_BLOCKS = 32
options = EngineOptions(
    Path(sys.argv[1]), "tiny", device="cpu", num_blocks=NUM_BLOCKS, max_num_seqs=5, run_ahead="on", max_model_len=96
)
replays = []


class Recorder:
    # What a graph does, without a GPU: the same function on the same memory, the result in the same place.
    def warm_up(self, run):
        run()

    def capture(self, run):
        index = len(replays)
        replays.append(0)

        def replay():
            replays[index] += 1
            run()

        return replay


class OneOf:
    # A guide: the next token is one above the last one, or two, modulo 50.
    def __init__(self, last):
        self.last = last

    def fill(self, words):
        may_come = np.isin(np.arange(32 * len(words)), ((self.last + 1) % 50, (self.last + 2) % 50))
        words[:] = np.packbits(may_come, bitorder="little").view(np.int32)

    def accept(self, token_id):
        assert (token_id - self.last) % 50 in (1, 2), (token_id, self.last)
        self.last = token_id


pools, num_uploads, of_launches, of_deferred = [], [0], [], []
upload = uploads.Uploader.upload


def counted_upload(self, *given):
    num_uploads[0] += 1
    return upload(self, *given)


uploads.Uploader.upload = counted_upload


def pool_with_a_spare_block(geometry, num_blocks, device, num_spare, staging, shared_memory):
    pools.append(KvPool(geometry, num_blocks, device, num_spare=1))
    return pools[-1]


def outputs(with_graphs):
    if with_graphs:
        torch_engine.cpu_ops = lambda options, *of: CudaOps(*of, options.max_num_seqs)
        pool_and_card.KvPool = pool_with_a_spare_block
    engine = torch_engine.TorchEngine.load(options, lambda done, total: None)
    if with_graphs:
        config, device = load_config(options.model_dir), torch.device("cpu")
        weights = load_weights(options.model_dir, config, torch.float32, device, lambda done, total: None)
        # What measures the memory on a GPU; the weights can be served afterwards. Prompts of 32 and 4 tokens; of what fits.
        for num_tokens, num_blocks, taken in ((20, 32, 2), (36, 32, 3), (36, 1, 1)):
            chosen = replace(options, max_batched_tokens=num_tokens, num_blocks=num_blocks, max_model_len=32)
            pool_nbytes = run_largest_step(config, trial_model(config, weights, chosen, None), torch.float32, device, chosen)
            assert pool_nbytes == taken * engine.card.block_nbytes, (num_tokens, num_blocks, pool_nbytes)
        assert len(weights.layers) == config.num_layers
        compile_steps(engine._model, engine._ops, engine._pool, options)  # they run as they are on a GPU
        compile_sampling(torch.zeros(1, config.vocab_size), engine._ops)
        engine._graphs = decode_graphs(
            config, engine._model, engine._ops, engine._pool, options, torch.float32, Recorder()
        )
    leader, rows = Leader(engine), []
    for index, length in enumerate((1, 37, 20, 5, 3)):
        # Few tokens may come, so that penalties meet them again, and in a step ahead count one that nobody knows.
        few = tuple(range(20 * index, 20 * index + 5))
        sampling = SamplingParams(
            max_tokens=99, seed=index, temperature=index / 3, top_k=50, repetition_penalty=(1.0, 1.4, 0.8, 1.0, 1.2)[index],
            frequency_penalty=(0.0, 0.5, 0.0, 0.9, 0.0)[index], presence_penalty=(0.0, 0.0, 0.0, 2.0, 0.5)[index],
            allowed_token_ids=few if index % 2 else (), logit_bias=((few[1], 2.0),), min_tokens=4, stop_token_ids=few[:2],
            num_logprobs=index or None,
        )
        blocks = [6 * index + place for place in range(6)]
        tokens = [(7 * index + 3 * place) % 199 for place in range(length)]
        rows.append(Sequence(str(index), 1, tokens, length, sampling, 0.0, block_tables=[blocks]))

    def take(step, given):
        for row, result in zip(step, given):
            (token,) = result.tokens
            row.num_computed_tokens = len(row.token_ids)
            row.token_ids.append(token.token_id)
            if row.guide is not None:
                row.guide.accept(token.token_id)
        return [(row.request_id, result.tokens[0].token_id) for row, result in zip(step, given)]

    yield take(rows, leader.step([StepRow(row, row.num_uncomputed_tokens) for row in rows]))
    before, launched = rows[:3], leader.launch([StepRow(row, 1) for row in rows[:3]])
    for step in (rows[:3], rows, rows[1:2], rows[2:] + rows[1:2]):
        num_before = num_uploads[0]
        behind = leader.launch([StepRow(row, 1, num_ahead=int(row in before)) for row in step], launched)
        of_launches.append(num_uploads[0] - num_before)
        yield take(before, launched.wait())
        before, launched = step, behind
    yield take(before, launched.wait())
    # Four rows, and then three in the place of four: the fourth's blocks may be anybody's by then.
    engine._pool.tensor[6:12] = 7.0
    yield take(rows[2:], leader.step([StepRow(row, 1) for row in rows[2:]]))
    assert (engine._pool.tensor[6:12] == 7.0).all(), "padding wrote where its row had been"
    # Their logits lie in the same memory for all steps, and are sampled when the tokens of the step in front are known.
    step = rows[2:]
    step[1].guide = OneOf(step[1].token_ids[-1])
    launched = leader.launch([StepRow(row, 1) for row in step])
    for _ in range(2):
        behind = leader.launch([StepRow(row, 1, num_ahead=1) for row in step], launched)
        assert behind.is_deferred
        yield take(step, launched.wait())
        num_before = num_uploads[0]
        behind.sample()
        of_deferred.append(num_uploads[0] - num_before)
        launched = behind
    yield take(step, launched.wait())


expected, given = list(outputs(False)), list(outputs(True))
assert given == expected, (given, expected)
# Captured for 5, 4, 2 and 1; the first run of each is no replay.
assert replays == [1, 7, 0, 1], replays
# Two steps' uploads find a buffer each: else the host would wait for one to launch the other.
assert 5 < max(of_launches) <= uploads._NUM_BUFFERS // 2, of_launches
assert 3 < max(of_deferred) <= uploads._NUM_BUFFERS // 2, of_deferred
(pool,) = pools
assert pool.tensor[NUM_BLOCKS].any(), "padding went elsewhere"
print("same", len(given))
"""


MENDED = """
import sys

sys.path.append({root!r})
import pytest
from tests.triton_interpreter import mend_loops

mend_loops(pytest.MonkeyPatch())
"""


def run_interpreted(script: str, model_dir: Path, *arguments: str) -> str:
    mended = MENDED.format(root=str(Path(__file__).parents[3]))
    done = subprocess.run(
        [sys.executable, "-c", mended + textwrap.dedent(script), str(model_dir), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


GLM_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda sizes: transformers.Qwen3Config(**sizes),
    "glm-4.5": lambda sizes: transformers.Glm4MoeConfig(**sizes, **GLM_EXPERTS, attention_bias=True, use_qk_norm=True),
}


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_kernels_and_cpu_agree(family: str, tmp_path: Path) -> None:
    # transformers writes into the dictionary of rotations
    rope = dict(SIZES["rope_parameters"])
    save_model(tmp_path, CONFIGS[family]({**SIZES, "num_hidden_layers": 2, "rope_parameters": rope}))
    assert run_interpreted(SCRIPT, tmp_path).startswith("same 8 ")


@pytest.mark.full
def test_kernels_and_cpu_agree_on_experts(tmp_path: Path) -> None:
    """The model also has sinks, windows in some layers, and an activation with limits."""
    given = {"num_experts_per_tok": 2, "num_local_experts": 5, "attention_bias": True, "sliding_window": 9}
    layer_types = ["sliding_attention", "full_attention"]
    sizes = {**SIZES, "num_hidden_layers": len(layer_types)}
    save_model(tmp_path, transformers.GptOssConfig(**sizes, **given, layer_types=layer_types))
    assert run_interpreted(SCRIPT, tmp_path).startswith("same 8 ")


@pytest.mark.full
def test_padded_batches_on_the_same_memory_decode_as_others_do(tmp_path: Path) -> None:
    experts = {"num_experts_per_tok": 2, "num_local_experts": 5, "moe_intermediate_size": 48}
    save_model(tmp_path, transformers.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 1}, **experts))
    assert run_interpreted(GRAPHS, tmp_path).startswith("same 10")
