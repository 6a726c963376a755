"""A model's operations on a CPU: by our kernels where they run."""

from __future__ import annotations

import logging

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.engine_options import EngineOptions
from kvrelay.engine.model_config import ModelConfig
from kvrelay.engine.native import CpuKernels, CpuKernelsError
from kvrelay.engine.native.compiled import default_cache_dir
from kvrelay.engine.ops import Ops
from kvrelay.engine.ops_cpu import CpuOps
from kvrelay.engine.ops_cpu_native import NativeCpuOps

logger = logging.getLogger(__name__)


def cpu_ops(
    options: EngineOptions, config: ModelConfig, pool: torch.Tensor, max_model_len: int, *, has_int8_weights: bool
) -> Ops:
    """Our kernels where they run. Raises ModelError if they are asked for and do not."""
    reason = "asked for"
    if options.cpu_kernels != "torch":
        widths = (config.hidden_size, config.intermediate_size)
        if pool.dtype != torch.bfloat16:
            reason = f"they are for bfloat16, not {pool.dtype}"
        elif not CpuKernels.fit(head_dim=config.head_dim, widths=widths):
            reason = f"they have no code for head_dim {config.head_dim} with widths {widths}"
        else:
            try:
                kernels = CpuKernels.load(default_cache_dir())
            except CpuKernelsError as error:
                reason = str(error)
                logger.warning("no kernels of our own on this CPU, the slower torch operations instead: %s", error)
            else:
                return NativeCpuOps(config, pool, max_model_len, kernels, has_int8_weights=has_int8_weights)
        if options.cpu_kernels == "native":
            raise ModelError(f"--cpu-kernels is native, but {reason}; use auto")
    logger.debug("torch operations on the CPU: %s", reason)
    return CpuOps(config, pool, max_model_len, has_int8_weights=has_int8_weights)
