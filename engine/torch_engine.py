"""The real engine: a Llama-family model on torch, on the CPU or on CUDA with our Triton kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.batch import build_batch
from kvrelay.engine.interface import BlockStore, StepRow
from kvrelay.engine.kv_pool import KvPool
from kvrelay.engine.linear_cpu import has_packed_linear
from kvrelay.engine.model import DecoderModel
from kvrelay.engine.model_config import ModelConfig, load_config
from kvrelay.engine.native import CpuKernels, CpuKernelsError
from kvrelay.engine.native.compiled import default_cache_dir
from kvrelay.engine.ops import Ops
from kvrelay.engine.ops_cpu import CpuOps
from kvrelay.engine.ops_cpu_native import NativeCpuOps
from kvrelay.engine.processors import LogitsProcessor
from kvrelay.engine.prompt_logprobs import add_prompt_logprobs
from kvrelay.engine.sampler import sample
from kvrelay.engine.weights import load_weights, weights_digest

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 2**30
_GPU_KV_FRACTION = 0.6
_MIN_POOL_TOKENS = 64  # a pool that holds less serves nobody


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is made from, all names resolved."""

    model_dir: Path
    model_id: str
    dtype: str = "auto"
    device: str = "auto"
    weight_format: str = "full"  # or "int8"
    cpu_kernels: str = "auto"  # "native", or "torch" without ours
    block_size: int = 16
    num_blocks: int | None = None  # instead of kv_memory_bytes
    kv_memory_bytes: int | None = None  # None: 1 GiB on CPU, 60 % of what is free on a GPU
    max_model_len: int | None = None
    num_threads: int = 1
    max_num_seqs: int = 64
    processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)  # by name; requests may ask for them


class TorchEngine:
    """Implements :class:`kvrelay.engine.interface.Engine`."""

    def __init__(
        self,
        card: ModelCard,
        model: DecoderModel,
        ops: Ops,
        pool: KvPool,
        num_threads: int,
        processors: Mapping[str, LogitsProcessor],
    ) -> None:
        self._card = card
        self._processors = processors
        self._model = model
        self._ops = ops
        self._pool = pool
        self._num_threads = num_threads
        self._device = pool.tensor.device

    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[int, int], None]) -> TorchEngine:
        """Load weights and allocate the pool. Raises ModelError naming what does not fit and the way out."""
        config = load_config(options.model_dir)
        device = _device(options.device)
        dtype_name = config.dtype if options.dtype == "auto" else options.dtype
        dtype: torch.dtype = getattr(torch, dtype_name)
        has_int8_weights = _has_int8_weights(options.weight_format, device, dtype)
        torch.set_num_threads(options.num_threads)
        weights = load_weights(options.model_dir, config, dtype, device, progress)
        block_nbytes = 2 * config.num_layers * config.kv_size * options.block_size * dtype.itemsize
        num_blocks = _num_blocks(options, block_nbytes, device)
        max_model_len = min(
            config.max_position_embeddings,
            options.max_model_len or config.max_position_embeddings,
            num_blocks * options.block_size,
        )
        try:
            pool = KvPool(config, num_blocks, options.block_size, dtype, device)
        except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(
                f"a KV pool of {num_blocks} blocks of {block_nbytes / 2**20:.2f} MiB does not fit the memory ({error}): "
                "lower --num-blocks or --kv-memory-mb"
            ) from error
        digest = weights_digest(options.model_dir) + ("-int8" if has_int8_weights else "")
        card = ModelCard(
            layout=config.layout(options.model_id, digest, dtype_name, options.block_size),
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_nbytes=block_nbytes,
            device_type=device.type,
            processors=tuple(options.processors),
        )
        if device.type == "cpu":
            ops = _cpu_ops(options, config, pool.tensor, max_model_len, has_int8_weights=has_int8_weights)
        else:
            from kvrelay.engine.native import triton_driver  # noqa: PLC0415 - needs Triton, which a CPU worker may lack
            from kvrelay.engine.ops_cuda import CudaOps  # noqa: PLC0415

            triton_driver.use_prebuilt()
            ops = CudaOps(config, pool.tensor, max_model_len, options.max_num_seqs)
        return cls(card, DecoderModel(config, weights, ops), ops, pool, options.num_threads, options.processors)

    @property
    def card(self) -> ModelCard:
        """See Engine."""
        return self._card

    @property
    def store(self) -> BlockStore:
        """See Engine."""
        return self._pool

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """See Engine."""
        self._pool.copy_blocks(pairs)

    @torch.inference_mode()
    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        """See Engine."""
        if not rows:
            return []
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)  # the count is the calling thread's
        batch = build_batch(rows, self._card.layout.block_size)
        step = self._ops.begin_step(batch)
        hidden = self._model.forward(torch.from_numpy(batch.token_ids).to(self._device), step)
        add_prompt_logprobs(batch, hidden, self._model.logits)
        results: list[SampledToken | None] = [None] * len(rows)
        if batch.sampling_rows:
            last_tokens = torch.from_numpy(batch.query_start_loc[1:][batch.sampling_rows] - 1).to(self._device)
            logits = self._model.logits(hidden[last_tokens])
            sequences = [batch.rows[index].sequence for index in batch.sampling_rows]
            tokens = sample(logits, sequences, self._ops, self._processors)
            for index, token in zip(batch.sampling_rows, tokens, strict=True):
                results[batch.order[index]] = token
        elif self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # blocks are shipped once step() returns: their K/V must be there
        return results


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device is cuda, but torch finds no GPU; use --device cpu, or install a CUDA build of torch")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _has_int8_weights(weight_format: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to round the weights. Raises ModelError where there are no kernels for that."""
    if weight_format != "int8":
        return False
    if device.type != "cpu" or dtype != torch.bfloat16 or not has_packed_linear(dtype):
        raise ModelError(
            f"--weight-format is int8, which runs on CPUs with bf16 and --dtype bfloat16, not with {dtype} on {device}; "
            "leave it at full"
        )
    return True


def _cpu_ops(
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


def _num_blocks(options: EngineOptions, block_nbytes: int, device: torch.device) -> int:
    if options.num_blocks is not None:
        num_blocks, source = options.num_blocks, "--num-blocks"
    else:
        nbytes, source = options.kv_memory_bytes, "--kv-memory-mb"
        if nbytes is None and device.type == "cuda":
            nbytes = int(torch.cuda.mem_get_info(device)[0] * _GPU_KV_FRACTION)
        num_blocks = (nbytes or _CPU_KV_BYTES) // block_nbytes
    if num_blocks * options.block_size < _MIN_POOL_TOKENS:
        raise ModelError(
            f"{source} gives a pool of {num_blocks} blocks of {options.block_size} tokens; at least {_MIN_POOL_TOKENS} "
            f"tokens are needed, and a block takes {block_nbytes / 2**20:.2f} MiB: raise {source}"
        )
    return num_blocks
