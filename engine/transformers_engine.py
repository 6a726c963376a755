"""An engine for models that have no path of their own here: transformers' layers over our pool, attention and sampler.

On a GPU steps are launched kernel by kernel: a model of transformers may read numbers back from the
device, which no graph can hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.build import cpu_paged_ops
from kvrelay.engine.backends.options import EngineOptions, device_of, dtype_of, num_blocks_of
from kvrelay.engine.config.model import SUPPORTED_DTYPES
from kvrelay.engine.kv.geometry import geometry_of, state_block_size
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.hf.adapters import adapt_layers, adaptable_layers
from kvrelay.engine.models.hf.check import MakeOps, check_model, plain_logits
from kvrelay.engine.models.hf.cut import LinearCut, cut_model, sum_outputs
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.pool_and_card import card_of, make_pool, max_model_len_of
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.weights.checkpoint import weights_digest


def load_transformers_engine(
    options: EngineOptions, progress: Callable[[int, int], None], part: RankPart | None = None
) -> TorchEngine:
    """Load the model, check it against transformers' own computation, allocate the pool.

    A rank loads the whole model and keeps its ``part`` of it; the card is of the whole. ``progress`` hears (bytes loaded, bytes in
    all).

    Raises ModelError naming what is not served, or does not fit, and the way out.
    """
    device = device_of(options.device)
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
    dtype = dtype_of(
        options.dtype, checkpoint_dtype(options.model_dir), device, lambda: "but for products and attention"
    )
    torch.set_num_threads(options.num_threads)
    model = load_model(options.model_dir, dtype, device, progress)
    if model.shape.states and options.may_widen_blocks:
        options = replace(options, block_size=state_block_size(model.shape, options.block_size))
    whole, memory = model.shape, None
    whole_geometry = geometry_of(whole, options.block_size, dtype)
    make_ops = _ops_on(device, options)
    plain = plain_logits(model)
    layers = adaptable_layers(model) if options.adapter_bytes else {}
    cuts: dict[str, LinearCut] = {}
    if part is not None:
        model, cuts = cut_model(model, part.cut)
    shape = model.shape
    geometry = geometry_of(shape, options.block_size, dtype)
    binding = make_ops(shape, KvPool(geometry, 1, device).tensor, options.block_size, 1)
    adapters, products = None, binding.make_low_rank(dtype)
    if options.adapter_bytes:
        adapters = Adapters(products, dtype, device)
    model.bind(binding, dtype, None if adapters is None else adapt_layers(adapters, layers, cuts))
    if part is not None:
        part.meet()
        sum_outputs(model.model, cuts, part.collectives)
    check_model(model, plain, make_ops, dtype)
    if device.type == "cuda":
        from kvrelay.engine.backends.cuda.build import measure_memory  # noqa: PLC0415 - a CPU worker may lack Triton

        memory = measure_memory(
            shape, lambda pool, *sizes: (model, make_ops(shape, pool.tensor, *sizes)), dtype, device, options
        )
    num_blocks = num_blocks_of(options, whole_geometry.block_nbytes, memory)
    pool = make_pool(options, geometry, num_blocks, device, part)
    max_model_len = max_model_len_of(options, shape, geometry, num_blocks)
    ops = make_ops(shape, pool.tensor, max_model_len, options.max_num_seqs)
    if device.type == "cuda":
        from kvrelay.engine.backends.cuda.build import compile_adapters, compile_sampling, compile_steps  # noqa: PLC0415
        from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps  # noqa: PLC0415

        compile_steps(model, ops, pool, options)
        if adapters is not None:
            compile_adapters(model, ops, pool, AdaptedSteps(adapters, products))
        compile_sampling(torch.zeros(1, shape.vocab_size, dtype=dtype, device=device), ops)
    digest = weights_digest(options.model_dir)
    card = card_of(options, whole, whole_geometry, num_blocks, device, digest, max_model_len)
    return TorchEngine(card, model, ops, pool, options, None, adapters)


def _ops_on(device: torch.device, options: EngineOptions) -> MakeOps:
    """What makes operations on the device."""
    if device.type == "cpu":
        return lambda shape, pool, *_: cpu_paged_ops(options, shape, pool)
    from kvrelay.engine.backends.cuda.ops import CudaPagedOps  # noqa: PLC0415 - a CPU worker may lack Triton

    return CudaPagedOps


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
