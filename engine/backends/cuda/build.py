"""A model on a GPU: its operations, and its decode steps as graphs. Imported only where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cuda.graphs import Agree, CaptureError, CudaRecorder, DecodeGraphs, Recorder
from kvrelay.engine.backends.cuda.inputs import StepInputs
from kvrelay.engine.backends.cuda.linear import can_multiply
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine.backends.cuda.memory import GpuMemory
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.cuda.trial import (
    MakeTrial,
    compile_adapters,
    compile_sampling,
    compile_steps,
    run_largest_step,
)
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.activations import Activations
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.adapted_layers import in_other_stages
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.decoder import DecoderModel, Taps
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.weights.kv_scales import unit_kv_scales
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.attention.kv_scales import require_e4m3
from kvrelay.kernels.checks import MAX_HEAD_DIM

logger = logging.getLogger(__name__)


def cuda_model(
    config: ModelConfig,
    whole: ModelConfig,
    weights: ModelWeights,
    pool: KvPool,
    max_model_len: int,
    options: EngineOptions,
    kv_scales: torch.Tensor | None,
    part: RankPart | None,
) -> tuple[DecoderModel, CudaOps, DecodeGraphs | None, Adapters | None]:
    """The model over ``pool``, which has a spare block. Takes ``weights`` over. Capturing graphs takes seconds.

    ``config``: of the ``part`` that is here, see DecoderModel; ``whole``: of the model. ``kv_scales``: see :func:`cuda_ops`.
    """
    graphs: DecodeGraphs | None = None
    try:
        ops = cuda_ops(config, pool, max_model_len, options, kv_scales)
        compute_dtype = weights.dtype
        adapters: Adapters | None = None
        adapted: AdaptedSteps | None = None
        if options.adapter_bytes:
            products = ops.make_low_rank(compute_dtype)
            elsewhere = in_other_stages(whole, Cut() if part is None else part.cut)
            adapters = Adapters(products, compute_dtype, pool.tensor.device, elsewhere)
            adapted = AdaptedSteps(adapters, products)
        model = DecoderModel(config, weights, ops, part, None if adapters is None else (adapters, whole))
        compile_steps(model, ops, pool, options)
        if adapted is not None:
            compile_adapters(model, ops, pool, adapted)
        compile_sampling(torch.zeros(1, config.vocab_size, dtype=compute_dtype, device=pool.tensor.device), ops)
        if options.decodes and options.cuda_graphs:
            recorder = CudaRecorder(of_several_ranks=part is not None)
            graphs = agreed_graphs(
                part,
                lambda agree: decode_graphs(config, model, ops, pool, options, compute_dtype, recorder, adapted, agree),
            )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"no memory is left beside the KV pool for steps and their graphs ({error}): lower --kv-memory-fraction or "
            "--kv-memory-mb, or start without graphs (--no-cuda-graphs)"
        ) from error
    return model, ops, graphs, adapters


def cuda_ops(
    config: ModelConfig, pool: KvPool, max_model_len: int, options: EngineOptions, kv_scales: torch.Tensor | None
) -> CudaOps:
    """Operations over ``pool``. Raises ModelError if this GPU has none for its type.

    ``kv_scales``: of an fp8 pool, on any device (:mod:`kvrelay.engine.weights.kv_scales`), else None.
    """
    if pool.tensor.dtype == torch.float8_e4m3fn:
        try:
            require_e4m3(pool.tensor.device)
        except ValueError as error:
            raise ModelError(f"--kv-dtype is fp8, but {error}: leave it at auto") from error
    on_device = None if kv_scales is None else kv_scales.to(pool.tensor.device)
    return CudaOps(config, pool.tensor, max_model_len, options.max_num_seqs, kv_scales=on_device)


def require_weight_format(rounding: Rounding | None, device: torch.device) -> None:
    """Raise ModelError unless this GPU has the type that weights are rounded to; None: they are not."""
    if rounding is not Rounding.FP8:
        return
    try:
        require_e4m3(device, "fp8 (e4m3) weights need", "take int8, or leave the weights as they are")
    except ValueError as error:
        raise ModelError(f"--weight-format is fp8, but {error}") from error


def require_fp8_products(activations: Activations | None, device: torch.device) -> None:
    """Raise ModelError unless this GPU multiplies fp8 with fp8; None: no activations are rounded."""
    if activations is None:
        return
    try:
        require_e4m3(device, "products of fp8 with fp8 need", "leave it out")
    except ValueError as error:
        raise ModelError(f"--fp8-activations is on, but {error}") from error


def require_attention(config: ModelConfig) -> None:
    """Raise ModelError unless the attention kernels take heads of the model's size. Latent attention has its own kernels."""
    if config.latent is None and (config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM):
        raise ModelError(
            f"head_dim is {config.head_dim}; on a GPU it must be a multiple of 16 up to {MAX_HEAD_DIM}: "
            "start all workers with --backend transformers, which pads heads"
        )


def kept_weights(device: torch.device) -> Callable[[StoredWeight], bool]:
    """Which weights of a quantised checkpoint this GPU multiplies as they are stored."""
    try:
        require_e4m3(device)
    except ValueError:
        return partial(can_multiply, has_e4m3=False)
    return partial(can_multiply, has_e4m3=True)


def trial_model(config: ModelConfig, weights: ModelWeights, options: EngineOptions, part: RankPart | None) -> MakeTrial:
    """A model over a pool that is only there to measure; ``weights`` stay whole."""

    def make(pool: KvPool, max_model_len: int, max_num_seqs: int) -> tuple[DecoderModel, CudaOps]:
        kv_scales = unit_kv_scales(config) if pool.tensor.dtype == torch.float8_e4m3fn else None
        ops = cuda_ops(config, pool, max_model_len, replace(options, max_num_seqs=max_num_seqs), kv_scales)
        # The model empties the list of layers that it is given, and multiplies with the very same matrices.
        return DecoderModel(config, replace(weights, layers=list(weights.layers)), ops, part), ops

    return make


def measure_memory(
    shape: ModelShape, make: MakeTrial, kv_dtype: torch.dtype, device: torch.device, options: EngineOptions
) -> GpuMemory:
    """The GPU's memory, with the weights there. The largest step is run to measure what it takes.

    Raises ModelError if it does not fit.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        pool_nbytes = run_largest_step(shape, make, kv_dtype, device, options)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"no memory is left beside the weights for the largest step, of {options.max_batched_tokens} tokens ({error}): lower "
            f"--max-batched-tokens{' or --max-num-seqs' if shape.states else ''}"
        ) from error
    torch.cuda.synchronize(device)
    step_nbytes = torch.cuda.max_memory_allocated(device) - before - pool_nbytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Adapters and a head come later, and must find room then.
    later = options.adapter_bytes + options.head_bytes
    held = torch.cuda.memory_reserved(device) + later
    memory = GpuMemory(total, free - later, held, step=max(0, step_nbytes))
    logger.info("GPU memory: %s", memory.text)
    return memory


def agreed_graphs(part: RankPart | None, capture: Callable[[Agree | None], DecodeGraphs]) -> DecodeGraphs | None:
    """What ``capture`` makes; None with a line in the log if it is of several ranks, and these launch steps kernel by kernel."""
    if part is None:
        return capture(None)
    if part.cut.num_stages > 1:
        logger.info("stages launch decode steps kernel by kernel: what they send each other is in no CUDA graph")
        return None
    try:
        return capture(lambda could: bool(part.collectives.least(int(could))))
    except CaptureError as error:
        logger.warning("decode steps are launched kernel by kernel, without CUDA graphs: %s", error)
        return None


@torch.inference_mode()
def decode_graphs(
    config: ModelConfig,
    model: DecoderModel,
    ops: CudaOps,
    pool: KvPool,
    options: EngineOptions,
    compute_dtype: torch.dtype,
    recorder: Recorder,
    adapted: AdaptedSteps | None = None,
    agree: Agree | None = None,
) -> DecodeGraphs:
    """Graphs of all batches that decode, captured now. ``compute_dtype``: the logits'. The others, and Raises: see DecodeGraphs."""
    device = pool.tensor.device
    heard: tuple[torch.Tensor, ...] = ()
    if options.taps is not None:
        sizes = (options.max_num_seqs, config.hidden_size)
        heard = tuple(torch.empty(sizes, dtype=compute_dtype, device=device) for _ in (*options.taps, "the last norm"))

    def forward(token_ids: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        taps = Taps(options.taps or ())
        hidden = model.forward(token_ids, ops.step_of(inputs), taps)
        assert hidden is not None, "a stage has no graphs"
        for buffer, found in zip(heard, (*taps.found, hidden), strict=False):  # without a head there are no buffers
            buffer[: len(token_ids)] = found
        return model.logits(hidden)

    return DecodeGraphs(
        forward,
        lambda num_rows, longest: ops.graph_inputs(num_rows, pool.num_blocks * options.block_size, longest),
        ops.update_tables,
        recorder,
        logits=torch.empty(options.max_num_seqs, config.vocab_size, dtype=compute_dtype, device=device),
        heard=heard,
        lengths=ops.lengths,
        adapted=adapted,
        agree=agree,
    )
