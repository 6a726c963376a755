"""The real engine: a model on torch, on the CPU, or on CUDA with our Triton kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.model_card import NATIVE_TEXT_ONLY, TEXT_ONLY, ModelCard
from kvrelay.engine.backends.cpu.build import cpu_ops, why_no_cpu_kernels
from kvrelay.engine.backends.cuda.memory import GpuMemory
from kvrelay.engine.backends.heads import make_draft_layer, make_head
from kvrelay.engine.backends.options import (
    EngineOptions,
    activations_of,
    asked_blocks,
    device_of,
    dtype_of,
    kv_dtype_of,
    num_blocks_of,
    rounding_of,
)
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.draft_layer import draft_layer, with_draft_layer
from kvrelay.engine.config.model import ModelConfig, load_config, needs_transformers
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.kv.division import DividedStates
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.adapted_layers import in_other_stages
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.draft_head import HeadBesideModel
from kvrelay.engine.models.ops import Model, StepGraphs, StepOps
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.pool_and_card import card_of, make_pool, max_model_len_of
from kvrelay.engine.sampling.prompt_logprobs import prompt_logprobs
from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.sampling.sampled import Sampled, UnderWay
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.interface import AdapterSlots, BlockStore, DeviceFailedError, LaunchedStep
from kvrelay.engine.step.plan import SamplingInputs, StepPlan
from kvrelay.engine.step.profile import StepProfiler
from kvrelay.engine.step.slots import Slots
from kvrelay.engine.torch_step import Deferred, TorchStep
from kvrelay.engine.weights.checkpoint import load_weights, weights_digest
from kvrelay.engine.weights.headers import checkpoint_files
from kvrelay.engine.weights.kv_scales import kv_scales_digest, load_kv_scales
from kvrelay.engine.weights.parameters import DraftLayerWeights
from kvrelay.engine.weights.rounding import rounded
from kvrelay.engine.weights.stored import StoredWeight


@dataclass(frozen=True, slots=True)
class _There:
    """A batch's arrays that the engine itself needs on the device; int64."""

    token_ids: torch.Tensor  # [num_tokens] the step's input
    sampled_slots: torch.Tensor  # [num_sampled] slots whose tokens are sampled
    last_tokens: torch.Tensor  # [num_sampled] indices of their last tokens in the input


class TorchEngine:
    """Implements :class:`kvrelay.engine.step.interface.Engine`."""

    def __init__(
        self,
        card: ModelCard,
        model: Model,
        ops: StepOps,
        pool: KvPool,
        options: EngineOptions,
        graphs: StepGraphs | None,
        adapters: Adapters | None = None,
        divided_states: DividedStates | None = None,
    ) -> None:
        """``divided_states``: see the property; None: no state is divided."""
        self._card = card
        self._divided_states = divided_states or {}
        self._adapters = adapters
        self._model = model
        self._ops = ops
        self._pool = pool
        self._options = options
        self._graphs = graphs
        self._device = pool.tensor.device
        max_blocks = -(-card.max_model_len // card.layout.block_size)
        self._slots = Slots(options.max_num_seqs, max_blocks, len(card.layout.geometry.groups))
        # The last sampled token of each slot: the next step reads it before the host knows it.
        self._sampled_tokens = torch.zeros(options.max_num_seqs, dtype=torch.int64, device=self._device)
        self._head: HeadBesideModel | None = None
        self._profiler = StepProfiler()

    @classmethod
    def load(
        cls, options: EngineOptions, progress: Callable[[int, int], None], part: RankPart | None = None
    ) -> TorchEngine:
        """Load the weights and allocate the pool, or a rank's ``part`` of both. The card is that of the whole model.

        Raises ModelError naming what does not fit, and what to do.
        """
        whole = _config_of(options)
        check_tokenizer(options.model_dir, whole.vocab_size)
        cut = Cut() if part is None else replace(part.cut, has_whole_experts=options.expert_parallel)
        config = cut.config(whole)
        device = device_of(options.device)
        dtype = dtype_of(options.dtype, config.dtype, device, partial(why_no_cpu_kernels, options, config))
        kv_dtype = kv_dtype_of(options.kv_dtype, dtype, device)
        rounding = rounding_of(options.weight_format, device, dtype)
        activations = activations_of(options, config, device, dtype)
        torch.set_num_threads(options.num_threads)
        keeps: Callable[[StoredWeight], bool] | None = None  # None on a CPU, where full weights are fastest
        if device.type == "cuda":
            from kvrelay.engine.backends.cuda.build import (  # noqa: PLC0415 - a CPU worker may lack Triton
                kept_weights,
                require_attention,
                require_fp8_products,
                require_weight_format,
            )

            require_attention(whole)
            require_weight_format(rounding, device)
            require_fp8_products(activations, device)
            keeps = kept_weights(device)
        kv_scales = _kv_scales_of(options, config, kv_dtype)
        weights = load_weights(options.model_dir, whole, dtype, device, progress, rounding, cut, keeps, activations)
        if part is not None:
            part.meet()
        geometry = geometry_of(whole, options.block_size, kv_dtype)
        memory: GpuMemory | None = None
        if device.type == "cuda":
            from kvrelay.engine.backends.cuda.build import cuda_model, measure_memory, trial_model  # noqa: PLC0415 - a CPU worker may lack Triton

            # Run even if the pool's size is given: this compiles kernels, and shows at the start what does not fit. Stages
            # have unequal parts of a block,
            # but the step is the same on all.
            asked = replace(options, num_blocks=asked_blocks(options, geometry.block_nbytes))
            memory = measure_memory(config, trial_model(config, weights, options, part), kv_dtype, device, asked)
        own_geometry = geometry_of(config, options.block_size, kv_dtype)
        num_blocks = num_blocks_of(options, geometry.block_nbytes, memory, own_geometry.block_nbytes)
        if part is not None:
            num_blocks = part.collectives.least(num_blocks)  # the GPUs' free memory may differ
        max_model_len = max_model_len_of(options, config, geometry, num_blocks)
        pool = make_pool(options, own_geometry, num_blocks, device, part)
        digest = weights_digest(options.model_dir) + ("" if rounding is None else f"-{rounding.value}")
        digest += "" if activations is None else "-fp8-activations"
        scales = "" if kv_scales is None else kv_scales_digest(kv_scales)
        card = card_of(
            options, whole, geometry, num_blocks, device, digest, max_model_len, scales, _no_images_of(options)
        )
        if device.type == "cpu":
            ops = cpu_ops(options, config, pool.tensor, max_model_len)
            if rounding is not None and weights.lm_head is not None:
                assert isinstance(weights.lm_head, torch.Tensor), "the head was rounded before"
                weights.lm_head = rounded(weights.lm_head, rounding)
            adapters: Adapters | None = None
            if options.adapter_bytes:
                adapters = Adapters(ops.make_low_rank(dtype), dtype, device, in_other_stages(whole, cut))
            model = DecoderModel(config, weights, ops, part, None if adapters is None else (adapters, whole))
            engine = cls(card, model, ops, pool, options, None, adapters)
            return engine._with_draft_layer(weights.draft, whole, cut, model, part)
        model, cuda_ops, graphs, adapters = cuda_model(
            config, whole, weights, pool, max_model_len, options, kv_scales, part
        )
        engine = cls(card, model, cuda_ops, pool, options, graphs, adapters)
        return engine._with_draft_layer(weights.draft, whole, cut, model, part)

    def _with_draft_layer(
        self,
        weights: DraftLayerWeights | None,
        whole: ModelConfig,
        cut: Cut,
        model: DecoderModel,
        part: RankPart | None,
    ) -> TorchEngine:
        """This engine, with the checkpoint's layer for drafting if that is loaded."""
        if weights is not None:
            layer, kv_bytes = cut.config(draft_layer(whole)), self._options.mtp_kv_bytes
            self._head = make_draft_layer(layer, weights, kv_bytes, model, self._slots, self._options, part)
        return self

    @torch.inference_mode()
    def load_head(self, directory: Path, kv_bytes: int) -> HeadBesideModel:
        """Load an EAGLE-3 head, which sees every later step. ``kv_bytes``: size of its own pool.

        The model is one of ours; CUDA graphs were captured with the head's taps. Raises ModelError if the head belongs to another
        model, its files are broken, or the pool is too small.
        """
        assert isinstance(self._model, DecoderModel), (
            f"{type(self._model).__name__} gives no hidden states of its layers"
        )
        self._head = make_head(directory, kv_bytes, self._model, self._slots, self._options)
        return self._head

    @property
    def head(self) -> HeadBesideModel | None:
        """What guesses: the layer of the checkpoint, if it was asked for, or the head that was loaded."""
        return self._head

    @property
    def card(self) -> ModelCard:
        """See Engine."""
        return self._card

    @property
    def adapters(self) -> AdapterSlots | None:
        """See Engine."""
        return self._adapters

    @property
    def profiler(self) -> StepProfiler:
        """See Engine. It records this process only."""
        return self._profiler

    @property
    def blocks(self) -> torch.Tensor:
        """See KvPool.blocks; for engines with several ranks."""
        return self._pool.blocks

    @property
    def own_geometry(self) -> KvGeometry:
        """What of a token's K/V is in :attr:`blocks`. The card's geometry is that of the whole model."""
        return self._pool.geometry

    @property
    def divided_states(self) -> DividedStates:
        """Which states a rank has a part of, and where that is in :attr:`blocks`."""
        return self._divided_states

    @property
    def store(self) -> BlockStore:
        """See Engine."""
        return self._pool

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """See Engine."""
        self._pool.copy_blocks(pairs)

    def check_device(self) -> None:
        """See Engine. After a CUDA error, everything that the process asks of the device fails."""
        try:
            (there,) = self._ops.upload((np.zeros(1, dtype=np.int64),))
            there.tolist()
        except torch.OutOfMemoryError:
            pass  # a smaller step may succeed
        except RuntimeError as error:
            raise DeviceFailedError(f"{self._device} does not even read a number back: {error}") from error

    def not_live(self) -> list[str]:
        """See Engine. A failed device shows in the next step."""
        return []

    def close(self) -> None:
        """See Engine. Graphs are freed at once, because they hold the ranks' connection. Other memory is freed with the object."""
        self._graphs = None

    @property
    def runs_ahead(self) -> bool:
        """See Engine. A CPU cannot launch a step while another one runs."""
        if self._options.run_ahead == "auto":
            return self._device.type == "cuda"
        return self._options.run_ahead == "on"

    @property
    def num_stages(self) -> int:
        """See Engine. A rank's part counts as one stage."""
        return 1

    @property
    def num_slots(self) -> int:
        """See Engine."""
        return self._options.max_num_seqs

    @torch.inference_mode()
    def encode(self, plan: StepPlan) -> None:
        """Encode the images that ``plan``, the next one, begins to compute; for engines with several ranks. Without it ``launch``
        does so. Raises as ``launch``.
        """
        self._set_threads()
        self._model.encode(plan, self._slots)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Engine."""
        self._set_threads()
        with self._profiler.step():
            step = self._compute(plan)
        if not step.is_deferred:
            self._profiler.end()
        return step

    def _set_threads(self) -> None:
        if torch.get_num_threads() != self._options.num_threads:
            torch.set_num_threads(self._options.num_threads)  # the setting is per calling thread

    def _compute(self, plan: StepPlan) -> TorchStep:
        self._slots.apply(plan)
        if self._head is not None:
            self._head.apply(plan)
        batch = build_batch(plan, self._slots, self._card.layout.block_size)
        try:
            return self._launch(batch, plan.sampling)
        except Exception:
            if self._device.type == "cuda":  # queued work must not write to blocks that are released now
                with contextlib.suppress(RuntimeError):
                    torch.cuda.current_stream(self._device).synchronize()
            raise

    def _launch(self, batch: Batch, inputs: SamplingInputs | None) -> TorchStep:
        copied = self._pool.order_steps()
        there = self._upload(batch)
        hidden, logits = self._forward(batch, there)
        sampled: Sampled | Deferred | None = None
        logprobs = {} if hidden is None else prompt_logprobs(batch, self._slots, hidden, self._model.logits)
        if logits is not None and inputs is None:
            sampled = Deferred(partial(self._sample_deferred, batch, there, logits))
        elif logits is not None and inputs is not None:
            sampled = self._sample(batch, there, logits, inputs, _under_way(batch, there))
        return TorchStep(batch, sampled, logprobs, self._device, copied)

    @torch.inference_mode()
    def _sample_deferred(self, batch: Batch, there: _There, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        """Sample when all tokens are known."""
        self._slots.learn(inputs.new_tokens)
        sampled = self._sample(batch, there, logits, inputs, None)
        self._profiler.end()
        return sampled

    def _sample(
        self, batch: Batch, there: _There, logits: torch.Tensor, inputs: SamplingInputs, under_way: UnderWay | None
    ) -> Sampled:
        index = batch.slots[batch.sampling_rows]
        drafts = [batch.rows[row].draft_tokens for row in batch.sampling_rows.tolist()]
        asking = Asking.of(self._slots, index, batch.seq_lens[batch.sampling_rows], inputs.over, drafts)
        sampled = sample(logits, asking, inputs.rules, self._ops, self._options.processors, under_way)
        self._sampled_tokens[there.sampled_slots] = sampled.tokens
        return sampled

    def _upload(self, batch: Batch) -> _There:
        sampled = batch.sampling_rows
        arrays = [batch.token_ids, batch.slots[sampled], batch.query_start_loc[1:][sampled] - 1]
        if batch.is_fed is None:
            return _There(*self._ops.upload(arrays))
        # Fed rows have one token each, and come first.
        num_fed = batch.num_decode_rows
        fed_slots = np.where(batch.is_fed, batch.slots, -1)[:num_fed]
        token_ids, sampled_slots, last_tokens, slots = self._ops.upload((*arrays, fed_slots))
        fed = torch.where(slots >= 0, self._sampled_tokens[slots.clamp_min(0)], token_ids[:num_fed])
        return _There(torch.cat((fed, token_ids[num_fed:])), sampled_slots, last_tokens)

    def _forward(self, batch: Batch, there: _There) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(hidden states of all tokens, if they are needed here; logits of the rows that sample, if there are any)."""
        if self._graphs is not None and self._graphs.fits(batch):
            logits = self._graphs.run(batch, there.token_ids)
            if self._head is not None:
                self._head.hear(batch, self._graphs.heard(len(batch.rows)))
            return None, logits
        if self._adapters is not None:
            self._adapters.begin_step(batch)
        elif batch.adapters is not None:
            raise ValueError("rows with adapters; the engine was started for none")
        self._model.begin_step(batch, self._slots, self._ops.upload)
        step = self._ops.begin_step(batch)
        if self._head is None:
            hidden = self._model.forward(there.token_ids, step)
        else:
            hidden = self._head.forward(there.token_ids, step, batch)
        if hidden is None or not len(batch.sampling_rows):
            return hidden, None
        is_all = len(batch.sampling_rows) == len(there.token_ids)
        return hidden, self._model.logits(hidden if is_all else hidden[there.last_tokens])


def _config_of(options: EngineOptions) -> ModelConfig:
    """The whole model's, with the layer for drafting if it is asked for."""
    config = load_config(options.model_dir)
    return with_draft_layer(config) if options.mtp_kv_bytes else config


def _under_way(batch: Batch, there: _There) -> UnderWay | None:
    """The tokens of sampling rows that come from the step in front; None if there are none."""
    if batch.is_fed is None:
        return None
    return UnderWay(batch.is_fed[batch.sampling_rows].astype(np.int32), there.token_ids[there.last_tokens])


def _no_images_of(options: EngineOptions) -> str:
    """See ModelCard. Our forward pass may have been asked for instead of one that reads images."""
    return NATIVE_TEXT_ONLY if needs_transformers("auto", options.model_dir) else TEXT_ONLY


def _kv_scales_of(options: EngineOptions, config: ModelConfig, kv_dtype: torch.dtype) -> torch.Tensor | None:
    """The scales of fp8 K/V; None for any other ``kv_dtype``. Raises ModelError for latents."""
    if kv_dtype != torch.float8_e4m3fn:
        return None
    if config.latent is not None:
        raise ModelError(
            f"--kv-dtype is fp8; {config.architecture} keeps latents, which stay as they are: leave it at auto"
        )
    return load_kv_scales(checkpoint_files(options.model_dir), config)
