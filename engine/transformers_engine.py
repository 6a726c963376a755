"""An engine for models that have no path of their own here: transformers' layers over our pool, attention and sampler."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.backends.options import EngineOptions, device_of, dtype_of, num_blocks_of
from kvrelay.engine.config.model import SUPPORTED_DTYPES, ModelShape
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.models.transformers_check import check_model
from kvrelay.engine.models.transformers_model import load_model
from kvrelay.engine.torch_engine import TorchEngine, card_of, make_pool, max_model_len_of
from kvrelay.engine.weights.checkpoint import checkpoint_files, weights_digest


def load_transformers_engine(options: EngineOptions, progress: Callable[[int, int], None]) -> TorchEngine:
    """Load the model, check it against transformers' own attention, allocate the pool.

    Raises ModelError naming what is not served, or does not fit, and the way out.
    """
    device = device_of(options.device)
    if device.type != "cpu":
        raise ModelError("models without a path of their own run on CPUs only as yet: start with --device cpu")
    if options.weight_format != "full":
        raise ModelError(
            f"--weight-format is {options.weight_format}, which needs a model with a path of its own; take full"
        )
    if options.kv_dtype != "auto":
        raise ModelError(f"--kv-dtype is {options.kv_dtype}, which needs a GPU; leave it at auto")
    num_bytes = sum(path.stat().st_size for path in checkpoint_files(options.model_dir))
    dtype = dtype_of(
        options.dtype, _checkpoint_dtype(options), device, lambda: "they are for models with a path of their own"
    )
    torch.set_num_threads(options.num_threads)
    progress(0, num_bytes)
    model = load_model(options.model_dir, dtype)
    progress(num_bytes, num_bytes)
    shape = model.shape
    geometry = geometry_of(shape, options.block_size, dtype)
    num_blocks = num_blocks_of(options, geometry.block_nbytes, None)
    pool = make_pool(options, geometry, num_blocks, device)
    ops = CpuPagedOps(shape, pool.tensor)
    model.bind(ops)
    check_model(model, _ops_of, dtype)
    card = card_of(
        options, shape, pool, weights_digest(options.model_dir), max_model_len_of(options, shape, num_blocks)
    )
    return TorchEngine(card, model, ops, pool, options, None)


def _ops_of(shape: ModelShape, pool: torch.Tensor) -> CpuPagedOps:
    return CpuPagedOps(shape, pool)


def _checkpoint_dtype(options: EngineOptions) -> str:
    """The number format that ``config.json`` names. Raises ModelError."""
    config = json.loads((options.model_dir / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        raise ModelError(f"{options.model_dir}: quantized checkpoints are not supported; use one in bf16, fp16 or fp32")
    text = config.get("text_config") or {}
    dtype = (
        config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    )
    name = str(dtype).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ModelError(
            f"{options.model_dir}: dtype {name} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}"
        )
    return name
