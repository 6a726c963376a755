"""A self-check at load: compares a model over paged K/V, with our parts, with the same model as transformers loaded it.

Two sequences run in chunks and batched. A plain forward pass of each, before any part is replaced, is the reference. The sequences
are short, so the check costs little beside loading. Windows longer than the sequences are shortened for the check if the model's
config allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf.gate import own_windows, probe_layers
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.ops import Model, StepOps
from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots

_BLOCK_SIZE = 8
_CHUNK = 13  # tokens per step and sequence
_LENGTHS = (27, 14)  # the last chunk of each is a single token, which layers and kernels may compute another way
_WINDOW = 8  # the window that replaces longer ones
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")  # fields of a config
# Relative distance of logits by number format. A wrong mask, scale or position is off by 0.1 or more.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}

LONGEST = max(_LENGTHS)  # tokens of the longest sequence

MakeOps = Callable[[ModelShape, torch.Tensor, int, int], Any]
"""Makes operations (PagedOps) over a pool ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, for a longest
sequence and a number of sequences.
"""
MakeModel = Callable[[ModelShape, torch.Tensor, int, int], tuple[Model, StepOps]]
"""Makes a model with its operations, over the same."""


@torch.inference_mode()
def plain_logits(model: TransformersModel) -> list[torch.Tensor]:
    """The reference of :func:`check_model`: for each sequence ``[its length, vocab]``. Call it before ``bind``."""
    with _short_windows(model), model.plain_attention():
        return _plain_logits(model)


def _plain_logits(model: TransformersModel) -> list[torch.Tensor]:
    device, found = model.model.device, []
    for token_ids in _prompts(model):
        positions = torch.arange(len(token_ids), device=device)[None]
        inputs = {"input_ids": torch.tensor([token_ids], device=device), "position_ids": positions}
        found.append(model.model(**inputs, use_cache=False).logits[0].float())
    return found


@torch.inference_mode()
def check_model(model: TransformersModel, plain: list[torch.Tensor], make_ops: MakeOps, dtype: torch.dtype) -> float:
    """The relative distance of the logits from transformers' own, ``plain``. Raises ModelError if it is too large."""
    try:
        with _short_windows(model) as shape:
            found = _paged_logits(model, shape, lambda *pool: (model, make_ops(*pool)), dtype)
    except Exception as error:
        raise ModelError(
            f"{model.shape.architecture} does not run over paged K/V ({type(error).__name__}: {error}): it is not served"
        ) from error
    return _distance(model.shape, found, plain, dtype)


@torch.inference_mode()
def compare_native(reference: TransformersModel, shape: ModelShape, make: MakeModel, dtype: torch.dtype) -> float:
    """Like :func:`check_model`, for our own forward pass beside ``reference``. ``shape``: of our model."""
    with reference.plain_attention():
        plain = _plain_logits(reference)
    return _distance(shape, _paged_logits(reference, shape, make, dtype), plain, dtype)


def _distance(shape: ModelShape, found: list[torch.Tensor], plain: list[torch.Tensor], dtype: torch.dtype) -> float:
    """Raises ModelError if it is too large."""
    distances = [
        float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, plain, strict=True)
    ]
    if not all(distance <= _TOLERANCES[dtype] for distance in distances):
        why = " (a recurrent layer that cannot continue in the middle of a prompt is one cause)" if shape.states else ""
        raise ModelError(
            f"{shape.architecture} over paged K/V is not what transformers computes: logits differ by {max(distances):.2g} of "
            f"their size, more than {_TOLERANCES[dtype]:g}{why}; it is not served"
        )
    return max(distances)


def _prompts(model: TransformersModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(model.shape.vocab_size, (count,), generator=generator).tolist() for count in _LENGTHS]


@contextmanager
def _short_windows(model: TransformersModel) -> Iterator[ModelShape]:
    """A context in which the model has windows shorter than the check's sequences; gives its shape then."""
    config = model.model.config.get_text_config()
    sizes = {name: getattr(config, name, None) or 0 for name in _WINDOW_FIELDS}
    long = {name: size for name, size in sizes.items() if size > _WINDOW}
    if not any(model.shape.sliding_windows) or not long:
        yield model.shape
        return
    for name in long:
        setattr(config, name, _WINDOW)
    try:
        layers = probe_layers(model.model)
        model.use_our_attention()
        yield replace(model.shape, sliding_windows=own_windows(layers.attention))
    finally:
        for name, size in long.items():
            setattr(config, name, size)


def _paged_logits(
    reference: TransformersModel, shape: ModelShape, make: MakeModel, dtype: torch.dtype
) -> list[torch.Tensor]:
    """For each prompt ``[its length, vocab]``."""
    prompts = _prompts(reference)
    num_blocks = [-(-len(token_ids) // _BLOCK_SIZE) for token_ids in prompts]
    geometry = geometry_of(shape, _BLOCK_SIZE, dtype)
    num_groups = len(geometry.groups)
    pool = KvPool(geometry, sum(num_blocks) * num_groups, reference.model.device)
    model, ops = make(shape, pool.tensor, max(num_blocks) * _BLOCK_SIZE, len(prompts))
    blocks = iter(torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(2)).tolist())
    params = SamplingParams(max_tokens=1, temperature=0.0)
    slots = Slots(len(prompts), max(num_blocks), num_groups)
    joins = tuple(SlotJoin(slot, "check", tuple(ids), len(ids), params) for slot, ids in enumerate(prompts))
    tables = tuple(
        TableDelta(slot, 0, tuple(next(blocks) for _ in range(count)), group)
        for slot, count in enumerate(num_blocks)
        for group in range(num_groups)
    )
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), _CHUNK):
        chunks = [(min(_CHUNK, len(ids) - start), slot) for slot, ids in enumerate(prompts) if start < len(ids)]
        rows = tuple(PlanRow(slot, start, num_tokens) for num_tokens, slot in sorted(chunks))  # single tokens first
        plan = StepPlan(rows=rows) if start else StepPlan(rows=rows, joins=joins, tables=tables)
        slots.apply(plan)
        batch = build_batch(plan, slots, _BLOCK_SIZE)
        (token_ids,) = ops.upload((batch.token_ids,))
        states = model.forward(token_ids, ops.begin_step(batch))
        assert states is not None, "a stage cannot be checked alone"
        for index, row in enumerate(rows):
            hidden[row.slot].append(states[batch.query_start_loc[index] : batch.query_start_loc[index + 1]])
    return [model.logits(torch.cat(parts)) for parts in hidden]
