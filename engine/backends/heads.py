"""Makes what guesses beside a loaded model, with its pool and its operations: an EAGLE-3 head, or the checkpoint's own layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.backends.cpu.build import cpu_ops
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.draft_layer import draft_layer
from kvrelay.engine.config.head import load_head_config
from kvrelay.engine.config.model import ModelConfig, load_config
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.draft_head import HeadBesideModel, ring_shape
from kvrelay.engine.models.draft_layer import DraftLayer
from kvrelay.engine.models.guesser import Guesser
from kvrelay.engine.models.head import HeadModel
from kvrelay.engine.models.ops import Ops
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.settings import DEFAULT_BLOCK_SIZE
from kvrelay.engine.step.slots import Slots
from kvrelay.engine.weights.checkpoint import load_embedding
from kvrelay.engine.weights.head import has_embedding, head_headers, load_head_weights
from kvrelay.engine.weights.parameters import DraftLayerWeights

logger = logging.getLogger(__name__)

_FEWEST_TOKENS = 64  # fewest tokens in a slot's share of the pool


def head_nbytes(
    directory: Path,
    kv_bytes: int,
    model: ModelConfig,
    dtype: torch.dtype,
    num_slots: int,
    *,
    is_cut: bool,
    block_size: int | None = None,
) -> int:
    """The memory that ``make_head`` will take for a model of type ``dtype``. ``is_cut``: among several ranks. ``block_size``:
    as in KvSettings.

    Raises ModelError as ``make_head``, as far as that is known without reading a tensor.
    """
    config = load_head_config(directory, model)
    _blocks_of_slot(
        config.layer, kv_bytes, num_slots, geometry_of(config.layer, block_size or DEFAULT_BLOCK_SIZE, dtype)
    )
    headers = head_headers(directory, config)
    num_elements = sum(math.prod(header.shape) for header in headers.values())
    num_elements += math.prod(ring_shape(config.layer.hidden_size, num_slots))
    if is_cut and not has_embedding(headers):
        num_elements += model.vocab_size * model.hidden_size
    return num_elements * dtype.itemsize + kv_bytes


def make_head(
    directory: Path, kv_bytes: int, target: DecoderModel, slots: Slots, options: EngineOptions
) -> HeadBesideModel:
    """Load the head in ``directory`` for the model ``target``. ``kv_bytes``: size of its pool, which ``slots`` share equally.

    Raises ModelError if it belongs to another model, its files are broken, or the pool is too small.
    """
    model = load_config(options.model_dir)
    config = load_head_config(directory, model)
    weights = load_head_weights(directory, config, target.dtype, target.device)
    if weights.embed is None and target.embeds_with_ranks:
        # Other ranks do not know when the head looks a token up.
        weights = replace(weights, embed=load_embedding(options.model_dir, model, target.dtype, target.device))

    def make(ops: Ops) -> HeadModel:
        return HeadModel(config, weights, ops, target.embed)

    return _beside(config.layer, model.hidden_size, kv_bytes, target, slots, options, make)


def draft_layer_nbytes(
    kv_bytes: int, model: ModelConfig, dtype: torch.dtype, num_slots: int, block_size: int | None = None
) -> int:
    """The memory that ``make_draft_layer`` will take beside the layer's weights, on each rank. ``model``: the whole one.

    Raises ModelError as ``make_draft_layer``.
    """
    layer = draft_layer(model)
    _blocks_of_slot(layer, kv_bytes, num_slots, geometry_of(layer, block_size or DEFAULT_BLOCK_SIZE, dtype))
    return math.prod(ring_shape(layer.hidden_size, num_slots)) * dtype.itemsize + kv_bytes


def make_draft_layer(
    config: ModelConfig,
    weights: DraftLayerWeights,
    kv_bytes: int,
    target: DecoderModel,
    slots: Slots,
    options: EngineOptions,
    part: RankPart | None,
) -> HeadBesideModel:
    """The layer for drafting beside its model ``target``. Takes ``weights`` over. ``config``, ``part``: see DraftLayer.

    ``kv_bytes``: as of ``make_head``. Raises ModelError if the pool is too small.
    """

    def make(ops: Ops) -> DraftLayer:
        return DraftLayer(config, weights, ops, target, part)

    return _beside(config, config.hidden_size, kv_bytes, target, slots, options, make)


def _beside(
    layer: ModelConfig,
    target_size: int,
    kv_bytes: int,
    target: DecoderModel,
    slots: Slots,
    options: EngineOptions,
    make: Callable[[Ops], Guesser],
) -> HeadBesideModel:
    """``make`` gets operations over the pool of what guesses, whose one layer is ``layer``.

    ``target_size``: elements of the model's hidden states.
    """
    geometry = geometry_of(layer, options.block_size, target.dtype)
    num_slots = len(slots.sequences)
    num_blocks = _blocks_of_slot(layer, kv_bytes, num_slots, geometry)
    pool = KvPool(geometry, num_slots * num_blocks, target.device)
    num_tokens = num_blocks * options.block_size
    logger.info("what guesses sees the last %d tokens of each of %d sequences", num_tokens, num_slots)
    if target.device.type == "cpu":
        ops: Ops = cpu_ops(options, layer, pool.tensor, num_tokens)
        return HeadBesideModel(make(ops), ops, target, slots, num_blocks, options.block_size)
    from kvrelay.engine.backends.cuda.build import cuda_ops  # noqa: PLC0415 - a CPU worker may lack Triton
    from kvrelay.engine.backends.cuda.trial import compile_guesses  # noqa: PLC0415

    on_gpu = cuda_ops(layer, pool, num_tokens, options, None)
    guesser = make(on_gpu)
    hidden = torch.zeros(1, target_size, dtype=target.dtype, device=target.device)
    compile_guesses(guesser, hidden, on_gpu, options)
    return HeadBesideModel(guesser, on_gpu, target, slots, num_blocks, options.block_size)


def _blocks_of_slot(layer: ModelConfig, kv_bytes: int, num_slots: int, geometry: KvGeometry) -> int:
    """The blocks that each of ``num_slots`` sequences has in a pool of ``kv_bytes``. Raises ModelError if these are too few."""
    block_size, block_nbytes = geometry.block_size, geometry.block_nbytes
    longest = -(-layer.max_position_embeddings // block_size)
    num_blocks = min(kv_bytes // (num_slots * block_nbytes), longest)
    if num_blocks * block_size < _FEWEST_TOKENS:
        nbytes = num_slots * block_nbytes * -(-_FEWEST_TOKENS // block_size)
        raise ModelError(
            f"--draft-kv-memory-mb is {kv_bytes / 2**20:.0f}, {num_blocks * block_size} tokens for each of {num_slots} "
            f"sequences; guesses need {_FEWEST_TOKENS}: take {-(-nbytes // 2**20)}, or fewer sequences (--max-num-seqs)"
        )
    return num_blocks
