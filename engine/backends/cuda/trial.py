"""Steps over made-up prompts, at the start of an engine on a GPU: what the largest one takes, and all kernels that later ones need.

Compiled when a step first needs it, a kernel would stall all streams.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.backends.options import EngineOptions, asked_blocks
from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.guesser import Guesser
from kvrelay.engine.models.ops import Model
from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.sampling.sampled import UnderWay
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.rules import num_words
from kvrelay.engine.step.slots import Slots
from kvrelay.kernels.attention.decode_workspace import decode_batch_sizes

MakeTrial = Callable[[KvPool, int, int], tuple[Model, CudaPagedOps]]
"""A model over a pool, for so many tokens of a sequence and so many sequences, and its operations."""


@torch.inference_mode()
def run_largest_step(
    shape: ModelShape, make: MakeTrial, kv_dtype: torch.dtype, device: torch.device, options: EngineOptions
) -> int:
    """Compute as many tokens as a step may have, and sample for as many sequences, over a pool of its own. With states, also
    compute a token of as many sequences.

    Returns that pool's bytes; it is not larger than one whose size is given.
    """
    geometry = geometry_of(shape, options.block_size, kv_dtype)
    asked = asked_blocks(options, geometry.block_nbytes)
    num_tokens = options.max_batched_tokens
    if asked is not None:
        num_tokens = max(1, min(num_tokens, asked * options.block_size))
    max_len = min(num_tokens, options.max_model_len or num_tokens, shape.max_position_embeddings)
    sampling = SamplingParams(max_tokens=1, top_p=0.9, typical_p=0.9, num_logprobs=0)
    prompts, num_blocks = [], 0
    for start in range(0, num_tokens, max_len):
        length = min(max_len, num_tokens - start)
        blocks = range(num_blocks, num_blocks + -(-length // options.block_size))
        num_blocks += len(blocks)
        prompts.append((length, tuple(blocks)))
    pool = KvPool(geometry, num_blocks, device)
    # Of very short sequences more make up a step than ever run.
    model, ops = make(pool, max_len, max(options.max_num_seqs, len(prompts)))
    slots, batch = _made_up(prompts, sampling, options.block_size, len(geometry.groups))
    hidden = model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
    if hidden is None:
        return pool.tensor.nbytes
    num_sampled = min(options.max_num_seqs, num_tokens)
    asking = Asking.of(slots, np.zeros(num_sampled, dtype=np.int64), np.ones(num_sampled, dtype=np.int64))
    sample(model.logits(hidden[:num_sampled]), asking, None, ops, {}).read()
    if shape.states:  # of single tokens alone, a step has other kernels, or copies each one's states
        singles = [(1, (0,))] * options.max_num_seqs
        _, batch = _made_up(singles, sampling, options.block_size, len(geometry.groups))
        model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
    return pool.tensor.nbytes


@torch.inference_mode()
def compile_steps(
    model: Model, ops: CudaPagedOps, pool: KvPool, options: EngineOptions, *, takes_whole: bool = False
) -> None:
    """Compute single tokens beside a prompt, in the spare block of ``pool``, for each number of them that has a kernel of its own.

    Compiled when a step first has so many, it would stall all streams. Over the very pool: by its shape kernels are chosen.
    ``takes_whole``: see ImageReader; the prompt is also computed as an image, whose tokens see each other.
    """
    spare = (pool.num_blocks,)
    for num_single in decode_batch_sizes(options.max_num_seqs):
        rows = [(1, spare)] * num_single + [(2, spare)]
        _, batch = _made_up(rows, SamplingParams(max_tokens=1), options.block_size, len(pool.geometry.groups))
        for step in ops.trial_steps(batch):
            hidden = model.forward(ops.upload((batch.token_ids,))[0], step)
            if hidden is not None:
                model.logits(hidden[-1:])
    if takes_whole:
        _, batch = _made_up([(2, spare)], SamplingParams(max_tokens=1), options.block_size, len(pool.geometry.groups))
        batch = replace(batch, last_seen=np.ones(2, dtype=np.int64))
        model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))


@torch.inference_mode()
def compile_guesses(guesser: Guesser, hidden: torch.Tensor, ops: CudaPagedOps, options: EngineOptions) -> None:
    """Compute guesses of single tokens beside that of a run, in the first block of a pool that nobody uses yet. See compile_steps.

    ``hidden``: any hidden states of the model, ``[1, hidden]``. Ranks that guess together must all call it.
    """
    for num_single in decode_batch_sizes(options.max_num_seqs):
        rows = [(1, (0,))] * num_single + [(2, (0,))]
        _, batch = _made_up(rows, SamplingParams(max_tokens=1), options.block_size)
        token_ids, last = ops.upload((batch.token_ids, batch.query_start_loc[1:] - 1))
        states = hidden.repeat(len(batch.token_ids), 1)
        fused = guesser.fuse([states] * len(guesser.taps), states)
        for step in ops.trial_steps(batch):
            _, logits = guesser.forward(fused, token_ids, step, last)
            ops.argmax(logits)


@torch.inference_mode()
def compile_adapters(model: Model, ops: CudaPagedOps, pool: KvPool, adapted: AdaptedSteps) -> None:
    """Compute a token in the spare block of ``pool`` with each kernel that adapters have; nobody has one yet."""
    geometry = pool.geometry
    rows = [(1, (pool.num_blocks,))]
    _, batch = _made_up(rows, SamplingParams(max_tokens=1), geometry.block_size, len(geometry.groups))
    for tiling in adapted.tilings:
        with adapted.over(adapted.no_rows(1, tiling)):
            model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))


@torch.inference_mode()
def compile_sampling(logits: torch.Tensor, ops: CudaPagedOps) -> None:
    """Sample from ``logits`` ``[1, vocab]`` with penalties, with and without a token under way, and with a guide's mask: compiled
    when a stream first asks for them, these kernels would stall all."""
    sampling = SamplingParams(max_tokens=2, repetition_penalty=1.1, top_p=0.9)
    slots, _ = _made_up([(2, (0,))], sampling, 16)
    slots.sequences[0].num_prompt_tokens = 1
    asking = Asking.of(slots, np.zeros(1, dtype=np.int64), np.full(1, 2))
    token_ids = torch.zeros(1, dtype=torch.int64, device=logits.device)
    for under_way in (None, UnderWay(np.ones(1, dtype=np.int32), token_ids)):
        sample(logits, asking, None, ops, {}, under_way).read()
    all_may_come = np.full((1, num_words(logits.shape[1])), -1, dtype=np.int32)
    for of_type in (logits, logits.float()):  # behind an operator's processor they are masked once more
        ops.mask_tokens(of_type, (0,), all_may_come)


def _made_up(
    prompts: Seq[tuple[int, tuple[int, ...]]], sampling: SamplingParams, block_size: int, num_groups: int = 1
) -> tuple[Slots, Batch]:
    """A step over prompts of zeros, (length, blocks) each, those of one token first. All groups write the same blocks."""
    slots = Slots(len(prompts), max(len(blocks) for _, blocks in prompts), num_groups)
    plan = StepPlan(
        rows=tuple(PlanRow(slot, 0, length) for slot, (length, _) in enumerate(prompts)),
        joins=tuple(
            SlotJoin(slot, "made up", (0,) * length, length, sampling) for slot, (length, _) in enumerate(prompts)
        ),
        tables=tuple(
            TableDelta(slot, 0, blocks, group)
            for slot, (_, blocks) in enumerate(prompts)
            for group in range(num_groups)
        ),
    )
    slots.apply(plan)
    return slots, build_batch(plan, slots, block_size)
