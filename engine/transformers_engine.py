"""An engine for models that have no path of their own here: transformers' layers over our pool, attention and sampler.

On a GPU steps are launched kernel by kernel: a model of transformers may read numbers back from the
device, which no graph can hold.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import IMAGES_OFF, TEXT_ONLY
from kvrelay.engine.backends.cpu.build import cpu_paged_ops
from kvrelay.engine.backends.options import EngineOptions, asked_blocks, device_of, dtype_of, num_blocks_of
from kvrelay.engine.config.model import SUPPORTED_DTYPES
from kvrelay.engine.images.processor import preprocessor_digest
from kvrelay.engine.images.reader import ProcessorReader
from kvrelay.engine.kv.division import divided_states
from kvrelay.engine.kv.geometry import geometry_of, state_block_size
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.hf.adapters import adapt_layers
from kvrelay.engine.models.hf.check import MakeOps, check_model
from kvrelay.engine.models.hf.loading import check_files, load_full_config
from kvrelay.engine.models.hf.ranked import ToLoad, load_rank, load_whole
from kvrelay.engine.models.hf.ranks.cut import sum_outputs
from kvrelay.engine.models.hf.reading import make_reader
from kvrelay.engine.models.hf.text import is_multimodal
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.pool_and_card import card_of, make_pool, max_model_len_of
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.weights.checkpoint import weights_digest
from kvrelay.engine.weights.stored import StoredWeight

logger = logging.getLogger(__name__)


def load_transformers_engine(
    options: EngineOptions, progress: Callable[[int, int], None], part: RankPart | None = None
) -> TorchEngine:
    """Load the model, check it against transformers' own computation, allocate the pool.

    A rank loads its ``part`` of the model; the card is of the whole. Only the first one has what encodes images, and its card alone
    says whether they are read. ``progress`` hears (bytes loaded, bytes in all).

    Raises ModelError naming what is not served, or does not fit, and the way out.
    """
    device = device_of(options.device)
    _require_full(options)
    dtype = dtype_of(
        options.dtype, checkpoint_dtype(options.model_dir), device, lambda: "but for products and attention"
    )
    torch.set_num_threads(options.num_threads)
    reader, no_images = _image_reader(options, dtype, part)
    adapts = bool(options.adapter_bytes)
    asked = ToLoad(options.model_dir, dtype, device, progress, reader, no_images, _kept_on(device), adapts)
    loaded = load_whole(asked) if part is None else load_rank(asked, part)
    model, whole, images, memory = loaded.model, loaded.shape, loaded.images, None
    if whole.states and options.may_widen_blocks:
        options = replace(options, block_size=state_block_size(whole, options.block_size))
    whole_geometry = geometry_of(whole, options.block_size, dtype)
    make_ops = _ops_on(device, options)
    shape = model.shape
    geometry = geometry_of(shape, options.block_size, dtype)
    binding = make_ops(shape, KvPool(geometry, 1, device).tensor, options.block_size, 1)
    adapters, products = None, binding.make_low_rank(dtype)
    if adapts:
        adapters = Adapters(products, dtype, device)
    model.bind(binding, dtype, None if adapters is None else adapt_layers(adapters, loaded.layers, loaded.cuts.linears))
    images.begin(model, part)  # ranks meet here
    ranks = None
    if part is not None:
        ranks = part.collectives
        sum_outputs(model.model, loaded.cuts, ranks)
    with loaded.checked_layers():
        images.check(make_ops, dtype, check_model(model, loaded.plain, make_ops, dtype, ranks))
    if device.type == "cuda":
        from kvrelay.engine.backends.cuda.build import measure_memory  # noqa: PLC0415 - a CPU worker may lack Triton

        of_encoder = images.measure(device, part)  # ranks meet here
        counted = replace(options, num_blocks=asked_blocks(options, whole_geometry.block_nbytes))
        memory = measure_memory(
            shape, lambda pool, *sizes: (model, make_ops(shape, pool.tensor, *sizes)), dtype, device, counted
        )
        memory = replace(memory, step=max(memory.step, of_encoder))
    num_blocks = num_blocks_of(options, whole_geometry.block_nbytes, memory, geometry.block_nbytes)
    if part is not None:
        num_blocks = part.collectives.least(num_blocks)  # the first rank has less memory, if it has the towers
    pool = make_pool(options, geometry, num_blocks, device, part)
    max_model_len = max_model_len_of(options, shape, geometry, num_blocks)
    ops = make_ops(shape, pool.tensor, max_model_len, options.max_num_seqs)
    if device.type == "cuda":
        from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps  # noqa: PLC0415
        from kvrelay.engine.backends.cuda.trial import compile_adapters, compile_sampling, compile_steps  # noqa: PLC0415

        compile_steps(model, ops, pool, options, takes_whole=images.takes_whole)
        if adapters is not None:
            compile_adapters(model, ops, pool, AdaptedSteps(adapters, products))
        compile_sampling(torch.zeros(1, shape.vocab_size, dtype=dtype, device=device), ops)
    digest = _digest(options.model_dir)
    card = card_of(
        options, whole, whole_geometry, num_blocks, device, digest, max_model_len, no_images=images.no_images
    )
    return TorchEngine(card, model, ops, pool, options, None, adapters, divided_states(shape, options.block_size))


def _require_full(options: EngineOptions) -> None:
    """Raise ModelError if a number format needs a forward pass of ours."""
    if options.weight_format != "full":
        raise ModelError(
            f"--weight-format is {options.weight_format}, which needs a model with a path of its own; take full"
        )
    if options.fp8_activations:
        raise ModelError("--fp8-activations is on, which needs a model with a path of its own; leave it out")
    if options.kv_dtype != "auto":
        raise ModelError(
            f"--kv-dtype is {options.kv_dtype}, which needs a model with a path of its own; leave it at auto"
        )


def _digest(directory: Path) -> str:
    """What tells this checkpoint's K/V from another's."""
    digest = weights_digest(directory)
    return digest + preprocessor_digest(directory) if is_multimodal(load_full_config(directory)) else digest


def _image_reader(
    options: EngineOptions, dtype: torch.dtype, part: RankPart | None
) -> tuple[ProcessorReader | None, str]:
    """What reads images for an engine that is to encode them; None with the reason why it encodes none."""
    if not is_multimodal(load_full_config(options.model_dir)):
        return None, TEXT_ONLY
    if not options.reads_images:
        return None, IMAGES_OFF
    if part is not None and not part.is_leader:
        return None, "the first rank encodes images"
    try:
        reader = make_reader(options.model_dir)
        check_files(options.model_dir, dtype, with_towers=True)
        return reader, ""
    except ModelError as error:
        logger.warning("prompts may have no images: %s", error)
        return None, str(error)


def _ops_on(device: torch.device, options: EngineOptions) -> MakeOps:
    """What makes operations on the device."""
    if device.type == "cpu":
        return lambda shape, pool, *_: cpu_paged_ops(options, shape, pool)
    from kvrelay.engine.backends.cuda.ops import CudaPagedOps  # noqa: PLC0415 - a CPU worker may lack Triton

    return CudaPagedOps


def _kept_on(device: torch.device) -> Callable[[StoredWeight], bool] | None:
    """Which stored weights the device multiplies as they are; None: it wants full ones."""
    if device.type == "cpu":
        return None
    from kvrelay.engine.backends.cuda.build import kept_weights  # noqa: PLC0415 - a CPU worker may lack Triton

    return kept_weights(device)


def checkpoint_dtype(directory: Path) -> str:
    """The number format that ``config.json`` names. Raises ModelError."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    dtype = (
        config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    )
    name = str(dtype).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ModelError(f"{directory}: dtype {name} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}")
    return name
