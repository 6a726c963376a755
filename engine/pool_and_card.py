"""An engine's KV pool, and the model card that it announces. Used for native models and for those of transformers."""

from __future__ import annotations

import logging

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.model_card import TEXT_ONLY, KvLayout, ModelCard
from kvrelay.engine.backends.options import NUM_SPARE_BLOCKS, EngineOptions
from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.device.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.ranks import RankPart

logger = logging.getLogger(__name__)


def max_model_len_of(options: EngineOptions, shape: ModelShape, geometry: KvGeometry, num_blocks: int) -> int:
    """Tokens of the longest sequence: the smallest of the model's limit, the operator's limit, and the pool's size."""
    longest = shape.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > longest:
        logger.warning(
            "--max-model-len is %d, but the model takes %d tokens; that holds", options.max_model_len, longest
        )
    fits = geometry.max_tokens(num_blocks, options.max_batched_tokens)
    return min(longest, options.max_model_len or longest, longest if fits is None else fits)


def make_pool(
    options: EngineOptions,
    geometry: KvGeometry,
    num_blocks: int,
    device: torch.device,
    part: RankPart | None,
) -> KvPool:
    """The pool of ``num_blocks`` logical blocks, or a rank's ``part`` of it, with the extra blocks and staging of a GPU.

    Raises ModelError if it does not fit the memory.
    """
    try:
        num_spare, staging = 0, None
        if device.type == "cuda":
            num_spare = NUM_SPARE_BLOCKS
            if part is None:  # otherwise the leader moves the blocks of all ranks
                staging = StagingPlan(CudaCopies(device), options.staging_bytes)
        shared_memory = None if part is None else part.pool_memory
        num_physical = num_blocks * len(geometry.groups)
        return KvPool(geometry, num_physical, device, num_spare=num_spare, staging=staging, shared_memory=shared_memory)
    except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(
            f"a KV pool of {num_blocks} blocks of {geometry.block_nbytes / 2**20:.2f} MiB does not fit the memory ({error}): "
            "lower --num-blocks or --kv-memory-mb"
        ) from error


def card_of(
    options: EngineOptions,
    shape: ModelShape,
    geometry: KvGeometry,
    num_blocks: int,
    device: torch.device,
    weights_digest: str,
    max_model_len: int,
    kv_scales: str = "",
    no_images: str = TEXT_ONLY,
) -> ModelCard:
    """The engine's model card. ``kv_scales``: their digest, see KvLayout. ``no_images``: see ModelCard."""
    return ModelCard(
        layout=KvLayout(
            model_id=options.model_id,
            weights_digest=weights_digest,
            geometry=geometry,
            rope=shape.rope_text,
            kv_scales=kv_scales,
        ),
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        device_type=device.type,
        processors=tuple(options.processors),
        no_images=no_images,
    )
