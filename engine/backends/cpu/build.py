"""Builds a model's operations on a CPU, with our own kernels where they can run."""

from __future__ import annotations

import logging

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.native import CpuKernels, CpuKernelsError
from kvrelay.engine.backends.cpu.native.compiled import default_cache_dir
from kvrelay.engine.backends.cpu.native_ops import NativeCpuOps, NativeCpuPagedOps
from kvrelay.engine.backends.cpu.ops import CpuOps, CpuPagedOps
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.models.ops import Ops, PagedOps

logger = logging.getLogger(__name__)


def cpu_kernels(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> CpuKernels:
    """Our kernels for a model in ``dtype``, compiled if necessary. Raises CpuKernelsError, which says why they cannot be used."""
    widths, rotary_size = (config.hidden_size, *config.intermediate_sizes), config.rotary_size
    if not CpuKernels.fit(head_sizes=_head_sizes(config), widths=widths, rotary_size=rotary_size):
        sizes = f"head_dim {_text(config)}, {rotary_size} of it rotating,"
        raise CpuKernelsError(f"they have no code for {sizes} with widths {widths}")
    return load_kernels(options, dtype)


def load_kernels(options: EngineOptions, dtype: torch.dtype) -> CpuKernels:
    """Our kernels for any model in ``dtype``, compiled if necessary. Raises CpuKernelsError."""
    if options.cpu_kernels == "torch":
        raise CpuKernelsError("--cpu-kernels is torch")
    if dtype != torch.bfloat16:
        raise CpuKernelsError(f"they are for bfloat16, not {dtype}")
    return CpuKernels.load(default_cache_dir())


def _head_sizes(shape: ModelShape) -> set[int]:
    """The sizes of keys and of values in all layers. A layer without values keeps latents; its 0 fits no kernel. Layers with
    entries use no kernel for attention.
    """
    if shape.entries:
        return set()
    return {size for one in shape.kv_sizes for size in (one.key_size, one.value_size)}


def _text(shape: ModelShape) -> str:
    return " and ".join(map(str, sorted(_head_sizes(shape))))


def why_no_cpu_kernels(options: EngineOptions, config: ModelConfig) -> str | None:
    """Why our kernels cannot run this model in bf16; None if they can."""
    try:
        cpu_kernels(options, config, torch.bfloat16)
    except CpuKernelsError as error:
        return str(error)
    return None


def cpu_paged_ops(options: EngineOptions, shape: ModelShape, pool: torch.Tensor) -> PagedOps:
    """Operations for a model that brings its own layers. They use our kernels where these run, if the model has no softcaps.

    Raises ModelError if the options require our kernels and these cannot run.
    """
    try:
        if shape.has_softcaps or not CpuKernels.fit(head_sizes=_head_sizes(shape), widths=()):
            raise CpuKernelsError(
                f"they have no code for softcaps, or for heads of {_text(shape)}, as of {shape.architecture}"
            )
        return NativeCpuPagedOps(shape, pool, load_kernels(options, pool.dtype))
    except CpuKernelsError as error:
        if options.cpu_kernels == "native":
            raise ModelError(f"--cpu-kernels is native, but {error}; use auto") from error
        is_slower = options.cpu_kernels == "auto" and pool.dtype == torch.bfloat16
        level = logging.WARNING if is_slower else logging.DEBUG
        logger.log(level, "no kernels of our own on this CPU, the slower torch operations instead: %s", error)
        return CpuPagedOps(shape, pool)


def cpu_ops(options: EngineOptions, config: ModelConfig, pool: torch.Tensor, max_model_len: int) -> Ops:
    """The operations of a model, with our kernels where they run.

    Raises ModelError if the options require them and they cannot run.
    """
    try:
        kernels = cpu_kernels(options, config, pool.dtype)
    except CpuKernelsError as error:
        if options.cpu_kernels == "native":
            raise ModelError(f"--cpu-kernels is native, but {error}; use auto") from error
        is_slower = options.cpu_kernels == "auto" and pool.dtype == torch.bfloat16
        logger.log(
            logging.WARNING if is_slower else logging.DEBUG,
            "no kernels of our own on this CPU, the slower torch operations instead: %s", error,
        )  # fmt: skip
        return CpuOps(config, pool, max_model_len)
    return NativeCpuOps(config, pool, max_model_len, kernels)
