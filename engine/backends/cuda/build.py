"""A model on a GPU: its operations, and its decode steps as graphs. Imported only where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cuda.graphs import Agree, CaptureError, CudaRecorder, DecodeGraphs, Recorder
from kvrelay.engine.backends.cuda.inputs import StepInputs
from kvrelay.engine.backends.cuda.linear import can_multiply
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine.backends.cuda.memory import GpuMemory
from kvrelay.engine.backends.cuda.ops import CudaOps, CudaPagedOps
from kvrelay.engine.backends.options import EngineOptions, asked_blocks
from kvrelay.engine.config.activations import Activations
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig, ModelShape
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.adapted_layers import in_other_stages
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.decoder import DecoderModel, Taps
from kvrelay.engine.models.ops import Model
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.sampling.sampled import UnderWay
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.rules import num_words
from kvrelay.engine.step.slots import Slots
from kvrelay.engine.weights.kv_scales import unit_kv_scales
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.attention.decode_workspace import decode_batch_sizes
from kvrelay.kernels.attention.kv_scales import require_e4m3
from kvrelay.kernels.checks import MAX_HEAD_DIM

logger = logging.getLogger(__name__)

MakeTrial = Callable[[KvPool, int, int], tuple[Model, CudaPagedOps]]
"""A model over a pool, for so many tokens of a sequence and so many sequences, and its operations."""


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


@torch.inference_mode()
def run_largest_step(
    shape: ModelShape, make: MakeTrial, kv_dtype: torch.dtype, device: torch.device, options: EngineOptions
) -> int:
    """Compute as many tokens as a step may have, and sample for as many sequences, over a pool of its own. With states, also
    compute a token of as many sequences.

    Returns that pool's bytes; it is not larger than one whose size is given.
    """
    geometry = geometry_of(shape, options.block_size, kv_dtype)
    asked = asked_blocks(options, geometry.block_nbytes)
    num_tokens = options.max_batched_tokens
    if asked is not None:
        num_tokens = max(1, min(num_tokens, asked * options.block_size))
    max_len = min(num_tokens, options.max_model_len or num_tokens, shape.max_position_embeddings)
    sampling = SamplingParams(max_tokens=1, top_p=0.9, typical_p=0.9, num_logprobs=0)
    prompts, num_blocks = [], 0
    for start in range(0, num_tokens, max_len):
        length = min(max_len, num_tokens - start)
        blocks = range(num_blocks, num_blocks + -(-length // options.block_size))
        num_blocks += len(blocks)
        prompts.append((length, tuple(blocks)))
    pool = KvPool(geometry, num_blocks, device)
    # Of very short sequences more make up a step than ever run.
    model, ops = make(pool, max_len, max(options.max_num_seqs, len(prompts)))
    slots, batch = _made_up(prompts, sampling, options.block_size, len(geometry.groups))
    hidden = model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
    if hidden is None:
        return pool.tensor.nbytes
    num_sampled = min(options.max_num_seqs, num_tokens)
    asking = Asking.of(slots, np.zeros(num_sampled, dtype=np.int64), np.ones(num_sampled, dtype=np.int64))
    sample(model.logits(hidden[:num_sampled]), asking, None, ops, {}).read()
    if shape.states:  # of single tokens, a step copies each one's states
        singles = [(1, (0,))] * options.max_num_seqs
        _, batch = _made_up(singles, sampling, options.block_size, len(geometry.groups))
        model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
    return pool.tensor.nbytes


@torch.inference_mode()
def compile_steps(
    model: Model, ops: CudaPagedOps, pool: KvPool, options: EngineOptions, *, takes_whole: bool = False
) -> None:
    """Compute single tokens beside a prompt, in the spare block of ``pool``, for each number of them that has a kernel of its own.

    Compiled when a step first has so many, it would stall all streams. Over the very pool: by its shape kernels are chosen.
    ``takes_whole``: see ImageReader; the prompt is also computed as an image, whose tokens see each other.
    """
    spare = (pool.num_blocks,)
    for num_single in decode_batch_sizes(options.max_num_seqs):
        rows = [(1, spare)] * num_single + [(2, spare)]
        _, batch = _made_up(rows, SamplingParams(max_tokens=1), options.block_size, len(pool.geometry.groups))
        for step in ops.trial_steps(batch):
            hidden = model.forward(ops.upload((batch.token_ids,))[0], step)
            if hidden is not None:
                model.logits(hidden[-1:])
    if takes_whole:
        _, batch = _made_up([(2, spare)], SamplingParams(max_tokens=1), options.block_size, len(pool.geometry.groups))
        batch = replace(batch, last_seen=np.ones(2, dtype=np.int64))
        model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))


@torch.inference_mode()
def compile_adapters(model: Model, ops: CudaPagedOps, pool: KvPool, adapted: AdaptedSteps) -> None:
    """Compute a token in the spare block of ``pool`` with each kernel that adapters have; nobody has one yet."""
    geometry = pool.geometry
    rows = [(1, (pool.num_blocks,))]
    _, batch = _made_up(rows, SamplingParams(max_tokens=1), geometry.block_size, len(geometry.groups))
    for tiling in adapted.tilings:
        with adapted.over(adapted.no_rows(1, tiling)):
            model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))


@torch.inference_mode()
def compile_sampling(logits: torch.Tensor, ops: CudaPagedOps) -> None:
    """Sample from ``logits`` ``[1, vocab]`` with penalties, with and without a token under way, and with a guide's mask: compiled
    when a stream first asks for them, these kernels would stall all."""
    sampling = SamplingParams(max_tokens=2, repetition_penalty=1.1, top_p=0.9)
    slots, _ = _made_up([(2, (0,))], sampling, 16)
    slots.sequences[0].num_prompt_tokens = 1
    asking = Asking.of(slots, np.zeros(1, dtype=np.int64), np.full(1, 2))
    token_ids = torch.zeros(1, dtype=torch.int64, device=logits.device)
    for under_way in (None, UnderWay(np.ones(1, dtype=np.int32), token_ids)):
        sample(logits, asking, None, ops, {}, under_way).read()
    all_may_come = np.full((1, num_words(logits.shape[1])), -1, dtype=np.int32)
    for of_type in (logits, logits.float()):  # behind an operator's processor they are masked once more
        ops.mask_tokens(of_type, (0,), all_may_come)


def _made_up(
    prompts: Seq[tuple[int, tuple[int, ...]]], sampling: SamplingParams, block_size: int, num_groups: int = 1
) -> tuple[Slots, Batch]:
    """A step over prompts of zeros, (length, blocks) each, those of one token first. All groups write the same blocks."""
    slots = Slots(len(prompts), max(len(blocks) for _, blocks in prompts), num_groups)
    plan = StepPlan(
        rows=tuple(PlanRow(slot, 0, length) for slot, (length, _) in enumerate(prompts)),
        joins=tuple(
            SlotJoin(slot, "made up", (0,) * length, length, sampling) for slot, (length, _) in enumerate(prompts)
        ),
        tables=tuple(
            TableDelta(slot, 0, blocks, group)
            for slot, (_, blocks) in enumerate(prompts)
            for group in range(num_groups)
        ),
    )
    slots.apply(plan)
    return slots, build_batch(plan, slots, block_size)


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
