"""The options of a real engine, and what follows from them for its device, its number formats and its pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.linear import has_packed_linear
from kvrelay.engine.backends.cpu.native.compiled import default_cache_dir
from kvrelay.engine.backends.cuda.memory import GpuMemory, pool_nbytes
from kvrelay.engine.config.activations import Activations, load_activations
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.sampling.processors import LogitsProcessor
from kvrelay.engine.weights.rounding import Rounding

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 2**30
_MIN_POOL_TOKENS = 64  # a smaller pool is useless
NUM_SPARE_BLOCKS = 1  # extra blocks at the end of a GPU's pool, which padding rows write to


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is made from. All names are resolved."""

    model_dir: Path
    model_id: str
    dtype: str = "auto"
    kv_dtype: str = "auto"  # or "fp8"
    device: str = "auto"
    weight_format: str = "full"  # or "int8", "fp8"
    fp8_activations: bool = False  # round the inputs of products to fp8, too
    cpu_kernels: str = "auto"  # "auto", "native", or "torch" (without our kernels)
    expert_parallel: bool = False  # each rank has whole experts
    block_size: int = 16
    may_widen_blocks: bool = False  # a model with recurrent layers takes as many tokens per block as suit their states
    num_blocks: int | None = None  # takes the place of kv_memory_bytes
    kv_memory_bytes: int | None = None  # None: 1 GiB on CPU, kv_memory_fraction on a GPU
    kv_memory_fraction: float = 0.9  # this worker's share of a GPU's memory, including its weights and its largest step
    staging_bytes: int | None = (
        None  # bytes of pinned memory between a GPU's pool and the network; None: 256 MiB, or four blocks
    )
    max_model_len: int | None = None
    num_threads: int = 1
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    reads_images: bool = False  # whether to load what encodes the images of prompts
    decodes: bool = True  # whether to prepare for steps of one token per sequence
    cuda_graphs: bool = True
    run_ahead: str = "auto"  # "on", "off"; auto is on on a GPU
    adapter_bytes: int = 0  # memory for adapters; 0: none will be loaded
    head_bytes: int = 0  # memory of a GPU that is left for what guesses, which is made after the pool
    mtp_kv_bytes: int = 0  # see :class:`kvrelay.engine.settings.Guessing`
    taps: tuple[int, ...] | None = None  # the same, for CUDA graphs
    processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)  # by the name that requests use


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Make Triton keep its compiled kernels in our cache, unless ``environment`` names another place.

    So one mounted cache keeps both. Triton's default is in a home directory, which a pod loses at its end.
    """
    environment.setdefault("TRITON_CACHE_DIR", str(default_cache_dir() / "triton"))


def device_of(name: str) -> torch.device:
    """The device for ``name``, which is "auto", "cpu" or "cuda". Raises ModelError if this machine has none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device is cuda, but torch finds no GPU; use --device cpu, or install a CUDA build of torch")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def dtype_of(name: str, checkpoint: str, device: torch.device, why_no_kernels: Callable[[], str | None]) -> torch.dtype:
    """The type for ``name``, for a checkpoint of type ``checkpoint``.

    "auto" is the checkpoint's type, except on a CPU without instructions for it: there it is float32, because torch would take
    several times as long for prompts, and no less for single tokens. Our own bf16 kernels are faster than either there, with half
    the memory. ``why_no_kernels`` returns None if they can be used, else the reason.
    """
    if name != "auto":
        return _torch_dtype(name)
    dtype = _torch_dtype(checkpoint)
    if device.type != "cpu" or has_packed_linear(dtype):
        return dtype
    reason = why_no_kernels() if dtype == torch.bfloat16 else f"ours are for bfloat16, not {checkpoint}"
    if reason is None:
        return dtype
    logger.warning(
        "this CPU has no %s products, and there are no kernels of our own for it (%s): computing in float32, with twice the memory",
        *(checkpoint, reason),
    )
    return torch.float32


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_dtype_of(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the pool of a model in ``dtype``. Raises ModelError if there are no kernels for it."""
    if name == "auto":
        return dtype
    if device.type != "cuda":
        raise ModelError("--kv-dtype is fp8, which needs a GPU; leave it at auto")
    return torch.float8_e4m3fn


def rounding_of(weight_format: str, device: torch.device, dtype: torch.dtype) -> Rounding | None:
    """The format that weights are rounded to; None for full weights. Raises ModelError if there are no kernels for it.

    Whether a GPU has e4m3 is checked elsewhere (:func:`kvrelay.engine.backends.cuda.build.require_weight_format`).
    """
    if weight_format == "full":
        return None
    rounding = Rounding(weight_format)
    if device.type == "cuda":
        if dtype not in (torch.bfloat16, torch.float16):
            raise ModelError(
                f"--weight-format is {weight_format}, which needs --dtype bfloat16 or float16 on a GPU, not {dtype} on {device}; "
                "leave it at full"
            )
        return rounding
    if rounding is Rounding.FP8:
        raise ModelError(f"--weight-format is fp8, which needs a GPU, not {device}; take int8, or leave it at full")
    if dtype != torch.bfloat16:
        raise ModelError(
            f"--weight-format is int8, which needs --dtype bfloat16 on a CPU, not {dtype}; leave it at full"
        )
    if not has_packed_linear(dtype):
        raise ModelError(
            "--weight-format is int8, which this CPU, without instructions for bf16, is slower with; leave it at full"
        )
    return rounding


def activations_of(
    options: EngineOptions, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Activations | None:
    """How activations are rounded to fp8; None: not at all. Raises ModelError if there are no products for it.

    Whether a GPU has e4m3 is checked elsewhere (:func:`kvrelay.engine.backends.cuda.build.require_fp8_products`).
    """
    if not options.fp8_activations:
        return None
    asked = "--fp8-activations is on"
    if device.type != "cuda":
        raise ModelError(f"{asked}, which needs a GPU that multiplies fp8 with fp8, not {device}; leave it out")
    if options.weight_format != "full":
        raise ModelError(
            f"{asked} and --weight-format is {options.weight_format}; weights are multiplied as the checkpoint stores them: leave "
            "one of both out"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"{asked}, which needs --dtype bfloat16 or float16, not {dtype}; leave it out")
    if config.experts is not None:
        raise ModelError(f"{asked}; {config.architecture} has experts, whose products take 16 bits only: leave it out")
    return load_activations(options.model_dir)


def asked_blocks(options: EngineOptions, block_nbytes: int) -> int | None:
    """The pool's blocks, if the options give their number or their memory; else None."""
    if options.num_blocks is not None:
        return options.num_blocks
    return None if options.kv_memory_bytes is None else options.kv_memory_bytes // block_nbytes


def num_blocks_of(
    options: EngineOptions, block_nbytes: int, memory: GpuMemory | None, own_nbytes: int | None = None
) -> int:
    """The pool's blocks. Raises ModelError if they are too few to be useful, or do not fit a GPU beside the largest step.

    ``memory``: the measurements of a GPU; None without a GPU, and a default is used. ``own_nbytes``: a rank's part of
    ``block_nbytes``; None: all of it.
    """
    here_nbytes = block_nbytes if own_nbytes is None else own_nbytes
    num_blocks = asked_blocks(options, block_nbytes)
    source = "--kv-memory-mb" if options.num_blocks is None else "--num-blocks"
    if num_blocks is None and memory is not None:
        num_blocks = pool_nbytes(memory, options.kv_memory_fraction) // here_nbytes
        source = f"--kv-memory-fraction {options.kv_memory_fraction:g}"
    elif num_blocks is None:
        num_blocks = _CPU_KV_BYTES // block_nbytes
    elif memory is not None and (num_blocks + NUM_SPARE_BLOCKS) * here_nbytes + memory.step > memory.free:
        raise ModelError(
            f"{source} gives a pool of {num_blocks} blocks, {num_blocks * here_nbytes / 2**30:.1f} GiB, which does not fit beside "
            f"the largest step, of {options.max_batched_tokens} tokens (the GPU's memory: {memory.text}): lower {source} or "
            "--max-batched-tokens"
        )
    if num_blocks * options.block_size < _MIN_POOL_TOKENS:
        measured = "" if memory is None else f" (the GPU's memory: {memory.text})"
        raise ModelError(
            f"{source} gives a pool of {num_blocks} blocks of {options.block_size} tokens; at least {_MIN_POOL_TOKENS} "
            f"tokens are needed, and a block takes {block_nbytes / 2**20:.2f} MiB{measured}: raise {source}"
        )
    return num_blocks
