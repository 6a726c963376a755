"""A self-check at load: compares a model over paged K/V, with our parts, with the same model as transformers loaded it.

Ranks have no whole model. They compare its first layers, which are enough (:mod:`kvrelay.engine.models.hf.ranks.kinds`).

Two sequences run in chunks and batched. A plain forward pass of each, before any part is replaced, is the reference. The sequences
are short, so the check costs little beside loading. Windows longer than the sequences are shortened for the check if the model's
config allows it.

A router whose two best experts are nearly equal may choose either, by rounding alone. All positions behind it then have other
logits, and both are right. So the reference runs again with its embeddings off by half a unit in the last place. What that moves a
position's logits, three times, is allowed there if the logits as a whole are too far away. A wrong pass is off at positions that
rounding does not move. Where it moves most of them far, a wrong pass could hide, and nothing is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf.gate import own_windows, probe_layers
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.text import mark_tokens
from kvrelay.engine.models.ops import Model, StepOps
from kvrelay.engine.models.ranks import Collectives
from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots

_BLOCK_SIZE = 8
_CHUNK = 13  # tokens per step and sequence
_LENGTHS = (27, 14)  # the last chunk of each is a single token, which layers and kernels may compute another way
_WINDOW = 8  # the window that replaces longer ones
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")  # fields of a config
_DRAWS = 3  # of noise: a near tie may fall the same way in one
_TIMES_MOVED = 3  # rounding in every layer moves more than that of embeddings alone
_MOST_MOVED = 0.1  # at half of the positions, if anything is allowed: a wrong pass is off by as much
# Relative distance of logits by number format. A wrong mask, scale or position is off by 0.1 or more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sequence of the check."""

    token_ids: list[int]
    images: ReadImages | None = None


@dataclass(frozen=True, slots=True)
class Plain:
    """What transformers computes for a sequence: ``logits`` ``[its length, vocab]``, and how far rounding may move them at each
    position, of their size: ``moved`` ``[its length]``.
    """

    logits: torch.Tensor
    moved: torch.Tensor


LONGEST = max(_LENGTHS)  # tokens of the longest sequence, without entries

MakeOps = Callable[[ModelShape, torch.Tensor, int, int], Any]
"""Makes operations (PagedOps) over a pool ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, for a longest
sequence and a number of sequences.
"""
MakeModel = Callable[[ModelShape, torch.Tensor, int, int], tuple[Model, StepOps]]
"""Makes a model with its operations, over the same."""


@torch.inference_mode()
def plain_logits(model: TransformersModel) -> list[Plain]:
    """The reference of :func:`check_model`, for each sequence. Call it before ``bind``."""
    with _short_windows(model), model.plain_attention():
        return _plain_logits(model.model, model.shape)


def _plain_logits(model: PreTrainedModel, shape: ModelShape) -> list[Plain]:
    logits = _forward(model, shape)
    moved = [torch.zeros(len(one), device=one.device) for one in logits]
    for draw in range(_DRAWS):
        with _disturbed(model, draw):
            moved = [
                torch.maximum(most, _apart(*pair))
                for most, *pair in zip(moved, _forward(model, shape), logits, strict=True)
            ]
    return list(map(Plain, logits, moved))


def _forward(model: PreTrainedModel, shape: ModelShape) -> list[torch.Tensor]:
    device, found = model.device, []
    for token_ids in _prompts(model, shape):
        positions = torch.arange(len(token_ids), device=device)[None]
        inputs = {"input_ids": torch.tensor([token_ids], device=device), "position_ids": positions}
        found.append(model(**inputs, use_cache=False).logits[0].float())
    return found


@contextmanager
def _disturbed(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """A context in which embeddings are off by half a unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, output.shape, generator=generator).to(output.device, torch.float32) * 2 - 1
        return (output.float() * (1 + signs * torch.finfo(output.dtype).eps / 2)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        yield
    finally:
        handle.remove()


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The relative distance of logits, by position."""
    distance: torch.Tensor = (ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return distance


@torch.inference_mode()
def check_model(
    model: TransformersModel,
    plain: list[Plain],
    make_ops: MakeOps,
    dtype: torch.dtype,
    ranks: Collectives | None = None,
) -> float:
    """The relative distance of the logits from transformers' own, ``plain``. Raises ModelError if it is too large.

    ``ranks``: each has a part of the model, and compares; the first one has ``plain``, and tells the others.
    """
    try:
        with _short_windows(model) as shape:
            prompts = list(map(Prompt, _prompts(model.model, shape)))
            found = paged_logits(
                model.model.device, shape, prompts, lambda *pool: (model, make_ops(*pool)), dtype, _CHUNK
            )
            if ranks is not None:
                plain = _told(plain, found, ranks)
    except Exception as error:
        # A collective fails on the ranks that wait for one that failed.
        theirs = ", or another rank failed first" if ranks is not None and isinstance(error, RuntimeError) else ""
        raise ModelError(
            f"{model.shape.architecture} does not run over paged K/V{theirs} ({type(error).__name__}: {error}): it is not served"
        ) from error
    return _distance(model.shape, found, plain, dtype)


def _told(plain: list[Plain], found: list[torch.Tensor], ranks: Collectives) -> list[Plain]:
    """What the first rank has in ``plain``, on all ranks, beside what they have ``found``."""
    there = plain or [
        Plain(torch.empty_like(ours, dtype=torch.float32), ours.new_empty(len(ours)).float()) for ours in found
    ]
    return [
        Plain(ranks.spread(one.logits.to(ours.device)), ranks.spread(one.moved.to(ours.device)))
        for one, ours in zip(there, found, strict=True)
    ]


@torch.inference_mode()
def compare_native(reference: PreTrainedModel, shape: ModelShape, make: MakeModel, dtype: torch.dtype) -> float:
    """Like :func:`check_model`, for our own forward pass beside ``reference``. ``shape``: of our model.

    ``reference``: as transformers loads it, with its own attention; it need not run over paged K/V.
    """
    plain = _plain_logits(reference, shape)
    found = paged_logits(reference.device, shape, list(map(Prompt, _prompts(reference, shape))), make, dtype, _CHUNK)
    return _distance(shape, found, plain, dtype)


def _distance(shape: ModelShape, found: list[torch.Tensor], plain: list[Plain], dtype: torch.dtype) -> float:
    """The relative distance of logits. Raises ModelError if it is too large."""
    distances = [
        float((ours.float() - theirs.logits).norm() / theirs.logits.norm())
        for ours, theirs in zip(found, plain, strict=True)
    ]
    if not all(
        distance <= TOLERANCES[dtype] or _is_rounding(ours, theirs, dtype)
        for distance, ours, theirs in zip(distances, found, plain, strict=True)
    ):
        why = " (a recurrent layer that cannot continue in the middle of a prompt is one cause)" if shape.states else ""
        most = max(float(one.moved.max()) for one in plain)
        if most > TOLERANCES[dtype] and dtype != torch.float32:
            why += (
                f" (rounding alone moves logits by up to {most:.2g}: --dtype float32 shows whether the model is wrong)"
            )
        raise ModelError(
            f"{shape.architecture} over paged K/V is not what transformers computes: logits differ by {max(distances):.2g} of "
            f"their size, more than {TOLERANCES[dtype]:g}{why}; it is not served"
        )
    return max(distances)


def _is_rounding(found: torch.Tensor, plain: Plain, dtype: torch.dtype) -> bool:
    """Whether rounding alone explains the distance at every position, and does not hide a wrong pass."""
    allowed = (_TIMES_MOVED * plain.moved).clamp_min(TOLERANCES[dtype])
    return bool(plain.moved.median() <= _MOST_MOVED and (_apart(found, plain.logits) <= allowed).all())


def _prompts(model: PreTrainedModel, shape: ModelShape) -> list[list[int]]:
    """The sequences. Of layers that keep entries, each makes one."""
    rate = max((one.rate for one in shape.entries), default=0)
    lengths = (-(-rate // _CHUNK) * _CHUNK + _LENGTHS[0], *_LENGTHS[1:])
    generator = torch.Generator().manual_seed(1)
    marks = mark_tokens(model.config)
    usual = [token for token in range(model.config.get_text_config().vocab_size) if token not in marks]
    places = [torch.randint(len(usual), (count,), generator=generator).tolist() for count in lengths]
    return [[usual[place] for place in row] for row in places]


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
        layers = probe_layers(model.model, len(model.layers))
        model.use_our_attention()
        yield replace(model.shape, sliding_windows=own_windows(layers))
    finally:
        for name, size in long.items():
            setattr(config, name, size)


def paged_logits(
    device: torch.device,
    shape: ModelShape,
    prompts: list[Prompt],
    make: MakeModel,
    dtype: torch.dtype,
    chunk: int,
) -> list[torch.Tensor]:
    """For each prompt ``[its length, vocab]``. ``chunk``: tokens per step and sequence, if no image must be computed whole."""
    num_blocks = [-(-len(prompt.token_ids) // _BLOCK_SIZE) for prompt in prompts]
    geometry = geometry_of(shape, _BLOCK_SIZE, dtype)
    num_groups = len(geometry.groups)
    pool = KvPool(geometry, sum(num_blocks) * num_groups, device)
    model, ops = make(shape, pool.tensor, max(num_blocks) * _BLOCK_SIZE, len(prompts))
    blocks = iter(torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(2)).tolist())
    slots = Slots(len(prompts), max(num_blocks), num_groups)
    joins = tuple(join_of(slot, prompt) for slot, prompt in enumerate(prompts))
    tables = tuple(
        TableDelta(slot, 0, tuple(next(blocks) for _ in range(count)), group)
        for slot, count in enumerate(num_blocks)
        for group in range(num_groups)
    )
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    done, is_first = [0] * len(prompts), True
    while any(start < len(prompt.token_ids) for start, prompt in zip(done, prompts, strict=True)):
        ends = [_chunk_end(prompt, start, chunk) for start, prompt in zip(done, prompts, strict=True)]
        chunks = [(end - start, slot) for slot, (start, end) in enumerate(zip(done, ends, strict=True)) if start < end]
        rows = tuple(
            PlanRow(slot, done[slot], num_tokens) for num_tokens, slot in sorted(chunks)
        )  # single tokens first
        plan = StepPlan(rows=rows, joins=joins, tables=tables) if is_first else StepPlan(rows=rows)
        slots.apply(plan)
        batch = build_batch(plan, slots, _BLOCK_SIZE)
        (token_ids,) = ops.upload((batch.token_ids,))
        model.begin_step(batch, slots, ops.upload)
        states = model.forward(token_ids, ops.begin_step(batch))
        assert states is not None, "a stage cannot be checked alone"
        for index, row in enumerate(rows):
            hidden[row.slot].append(states[batch.query_start_loc[index] : batch.query_start_loc[index + 1]])
        done, is_first = ends, False
    return [model.logits(torch.cat(parts)) for parts in hidden]


def join_of(slot: int, prompt: Prompt) -> SlotJoin:
    """The prompt in a slot."""
    token_ids, params = tuple(prompt.token_ids), SamplingParams(max_tokens=1, temperature=0.0)
    offset = 0 if prompt.images is None else prompt.images.position_offset
    return SlotJoin(slot, "check", token_ids, len(token_ids), params, prompt.images, offset)


def _chunk_end(prompt: Prompt, start: int, chunk: int) -> int:
    """Where the chunk from ``start`` on ends: not in an image whose tokens see each other."""
    end = min(start + chunk, len(prompt.token_ids))
    if prompt.images is not None and prompt.images.takes_whole:
        end = max((span.stop for span in prompt.images.spans if span.start < end < span.stop), default=end)
    return end
