"""A start compiles every kernel that later steps need, so no step asks Triton for another specialisation.

Nothing is compiled or run here. The launches of a whole engine over the GPU's operations are recorded on the CPU, and Triton's
code computes each kernel's key. This runs in its own process, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.draft_layers import save_with_draft_layer
from tests.engine.conftest import SIZES, save_model
from tests.heads import save_head

INDEXER = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 6, "first_k_dense_replace": 3, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "indexer_types": ["full", "shared", "full"],
}  # fmt: skip

SCRIPT = """
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends import heads
from kvrelay.engine.backends.cuda import build as cuda
from kvrelay.engine.backends.cuda import trial
from kvrelay.engine.backends.cuda import ops as ops_cuda
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine import pool_and_card, torch_engine
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.config.model import load_config
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.config.head import load_head_config
from kvrelay.engine.models.draft_head import _Run
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.kernels.linear import vector

MAX_NUM_SEQS, NUM_BLOCKS = 40, 600
backend = make_backend(GPUTarget("cuda", 90, 32))
binders, keys = {}, defaultdict(set)


def record(kernel, *args, grid, warmup, **kwargs):
    if kernel not in binders:
        binders[kernel] = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    given, specialisation, options = binders[kernel](*args, **kwargs)
    keys[kernel.__name__].add(f"{specialisation} {sorted(options.items())}")
    if "tokens_ptr" in given:
        given["tokens_ptr"].zero_()  # the next step's input


jit.JITFunction.run = record
random.seed(0)
block_size, guessing = int(sys.argv[2]), sys.argv[3]
if block_size == 64:  # tiles are boxes there, and one row is multiplied without cuBLAS
    ops_cuda.nvidia_capability = lambda device: (9, 0)
    vector._MIN_FULL_OUTS = 1
options = EngineOptions(
    Path(sys.argv[1]), "tiny", dtype="bfloat16", device="cpu", block_size=block_size, num_blocks=NUM_BLOCKS, run_ahead="on",
    max_num_seqs=MAX_NUM_SEQS, max_batched_tokens=30, adapter_bytes=1,
    mtp_kv_bytes=2**23 if guessing == "layer" else 0, taps=() if guessing else None,
)


def pool_with_a_spare_block(*of, num_spare, staging, shared_memory):
    return KvPool(*of, num_spare=1)


pool_and_card.KvPool = pool_with_a_spare_block
torch_engine.cpu_ops = heads.cpu_ops = lambda options, *of: CudaOps(*of, options.max_num_seqs)
engine = torch_engine.TorchEngine.load(options, lambda done, total: None)
# One row's kernel comes with the model: of a start's steps only those of adapters have one row.
of_model = {"_vector_linear_kernel": set(keys.get("_vector_linear_kernel", ()))}
config = load_config(options.model_dir)
weights = load_weights(options.model_dir, config, torch.bfloat16, torch.device("cpu"), lambda done, total: None)
# What a start does on a GPU.
measured = cuda.trial_model(config, weights, options, None)
trial.run_largest_step(config, measured, torch.bfloat16, torch.device("cpu"), options)
trial.compile_steps(engine._model, engine._ops, engine._pool, options, takes_whole=True)
trial.compile_adapters(engine._model, engine._ops, engine._pool, AdaptedSteps(engine._adapters, engine._adapters._products))
trial.compile_sampling(torch.zeros(1, config.vocab_size), engine._ops)
hidden = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16)
head = engine.load_head(options.model_dir / "head", 2**23) if guessing == "head" else engine.head
if head is not None:
    trial.compile_guesses(head._model, hidden, head._ops, options)
engine._adapters._loaded.update((1, 2, 3))  # nothing reads their matrices
known = {name: set(found) for name, found in keys.items()} | of_model
begin_step = engine._ops.begin_step


def begin_step_with_images(batch):
    is_image = batch.max_query_len > 1 and random.random() < 0.5
    return begin_step(replace(batch, last_seen=batch.positions) if is_image else batch)


engine._ops.begin_step = begin_step_with_images


def params():
    return SamplingParams(
        max_tokens=999, seed=1, temperature=random.choice((0.0, 1.0)), top_p=random.choice((1.0, 0.9)),
        repetition_penalty=random.choice((1.0, 1.3)), presence_penalty=random.choice((0.0, 0.4)),
        typical_p=random.choice((1.0, 1.0, 0.7)), num_logprobs=random.choice((None, 2)),
    )


def sequence(length, computed):
    blocks = random.sample(range(NUM_BLOCKS), -(-(length + 2) // options.block_size))
    return Sequence(
        str(length), 1, [0] * length, length, params(), 0.0, block_tables=[blocks], num_computed_tokens=computed,
        adapter=random.randrange(4),
    )


num_mixed, leader = 0, Leader(engine)
for _ in range(120):
    rows = []
    for _ in range(random.choice((0, 1, random.randrange(MAX_NUM_SEQS + 1)))):
        length = random.choice((1, 16, random.randrange(1, 200)))
        rows.append(StepRow(sequence(length, length - 1), 1))
    num_single = len(rows)
    for _ in range(min(MAX_NUM_SEQS - len(rows), random.randrange(5)) if rows else random.randrange(1, 5)):
        length = random.choice((16, random.randrange(2, 200)))
        count = random.randrange(2, length + 1)
        start = random.choice((0, length - count))
        rows.append(StepRow(sequence(length, start), count))
    num_mixed += 0 < num_single < len(rows)
    launched = leader.launch(rows)
    if num_single == len(rows):  # a step ahead
        leader.launch([StepRow(row.sequence, 1, num_ahead=1) for row in rows], launched)
for _ in range(60 if head else 0):  # what a head computes to guess
    runs = [
        _Run(slot, random.randrange(50), [0] * random.choice((1, 1, 1, random.randrange(2, 6))))
        for slot in random.sample(range(MAX_NUM_SEQS), random.randrange(1, MAX_NUM_SEQS + 1))
    ]
    batch = head._batch(sorted(runs, key=lambda run: len(run.token_ids) > 1))
    token_ids, last = head._ops.upload((batch.token_ids, batch.query_start_loc[1:] - 1))
    states = hidden.repeat(len(token_ids), 1)
    fused = head._model.fuse([states] * len(head._model.taps), states)
    _, logits = head._model.forward(fused, token_ids, head._begin_step(batch), last)
    head._ops.argmax(logits)
for name, found in keys.items():
    assert found == known.get(name), (name, len(known.get(name, ())), found - known.get(name, set()))
    print(name, len(found))
print("mixed", num_mixed)
"""


@pytest.mark.parametrize(
    ("config", "given", "block_size", "guessing"),
    [
        pytest.param(transformers.Qwen3Config, {}, 16, "head", marks=pytest.mark.full),
        pytest.param(transformers.Qwen3Config, {}, 64, "", marks=pytest.mark.full),
        (transformers.MistralConfig, {"sliding_window": 24}, 16, ""),
        (
            transformers.Qwen3MoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            16,
            "",
        ),
        pytest.param(transformers.GlmMoeDsaConfig, INDEXER, 16, "", marks=pytest.mark.full),
        pytest.param(transformers.DeepseekV3Config, {}, 16, "layer", marks=pytest.mark.full),
    ],
)
def test_no_step_compiles_what_the_start_did_not(
    tmp_path: Path, config: type[transformers.PretrainedConfig], given: dict[str, Any], block_size: int, guessing: str
) -> None:
    if guessing == "layer":
        save_with_draft_layer(tmp_path, "deepseek_v3", **given)
    else:
        save_model(tmp_path, config(**{**SIZES, **given}))
    if guessing == "head":
        (tmp_path / "head").mkdir()
        save_head(tmp_path / "head", tmp_path, num_drafted=66, taps=(0, 1))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(block_size), guessing],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split() for line in done.stdout.splitlines())
    assert int(said["mixed"]) > 20
    if guessing == "layer":  # over its own pool it has the kernels of the model
        assert (said["_latent_prefill_kernel"], said["_latent_split_kernel"]) == ("1", "3")
        return
    if given is INDEXER:
        # Over blocks, and over what is picked; for single tokens for each power of two.
        assert (said["_latent_prefill_kernel"], said["_latent_split_kernel"]) == ("2", "6")
        assert said["_index_scores_kernel"] == "1"
        return
    # One prefill kernel for all steps with images, and one for the others. A head has other sizes than its model.
    assert said["_prefill_attention_kernel"] == ("3" if guessing else "2")
    # Decode attention has one kernel for each power of two, from 16 to what 40 rows need.
    assert said["_decode_split_kernel"] == ("6" if guessing else "3")
    assert said["_penalties_kernel"] == "2"  # with and without a token in flight
    # Of the matrices only o has inputs in whole pieces.
    assert said.get("_vector_linear_kernel") == ("1" if block_size == 64 else None)
    # For few and for many rows, with products of one linear layer and of several.
    assert said["_shrink_kernel"] == said["_expand_kernel"] == "4"
    # Both products of experts have one kernel each for few, more and many rows per expert. Steps have up to 400.
    assert said.get("_grouped_linear_kernel") == ("6" if "num_experts" in given else None)
    # Steps of one token and of two, which have as few routes as there are experts. Tokens with more experts have another kernel.
    assert said.get("_few_gate_up_kernel") == ("1" if "num_experts" in given else None)
    assert said.get("_few_down_kernel") == ("2" if "num_experts" in given else None)
