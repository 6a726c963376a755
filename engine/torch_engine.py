"""The real engine: a Llama-family model on torch, on the CPU or on CUDA with our Triton kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.backends.cpu.build import cpu_ops, why_no_cpu_kernels
from kvrelay.engine.backends.cuda.memory import GpuMemory
from kvrelay.engine.backends.options import (
    NUM_SPARE_BLOCKS,
    EngineOptions,
    device_of,
    dtype_of,
    kv_dtype_of,
    num_blocks_of,
    rounding_of,
)
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.pool import KvPool, block_nbytes_of
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.ops import Ops, StepGraphs
from kvrelay.engine.sampling.prompt_logprobs import add_prompt_logprobs
from kvrelay.engine.sampling.sampled import Sampled, UnderWay
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.interface import BlockStore, DeviceFailedError, DoneStep, LaunchedStep, StepRow
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.engine.torch_step import Deferred, TorchStep
from kvrelay.engine.weights.checkpoint import checkpoint_files, load_weights, weights_digest
from kvrelay.engine.weights.kv_scales import kv_scales_digest, load_kv_scales


class TorchEngine:
    """Implements :class:`kvrelay.engine.step.interface.Engine`."""

    def __init__(
        self,
        card: ModelCard,
        model: DecoderModel,
        ops: Ops,
        pool: KvPool,
        options: EngineOptions,
        graphs: StepGraphs | None,
    ) -> None:
        self._card = card
        self._model = model
        self._ops = ops
        self._pool = pool
        self._options = options
        self._graphs = graphs
        self._device = pool.tensor.device

    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[int, int], None]) -> TorchEngine:
        """Load weights and allocate the pool. Raises ModelError naming what does not fit and the way out."""
        config = load_config(options.model_dir)
        device = device_of(options.device)
        dtype = dtype_of(options.dtype, config.dtype, device, partial(why_no_cpu_kernels, options, config))
        kv_dtype = kv_dtype_of(options.kv_dtype, dtype, device)
        rounding = rounding_of(options.weight_format, device, dtype)
        torch.set_num_threads(options.num_threads)
        if device.type == "cuda":
            from kvrelay.engine.backends.cuda.build import require_weight_format  # noqa: PLC0415 - a CPU worker may lack Triton

            require_weight_format(rounding, device)
        kv_scales: torch.Tensor | None = None
        if kv_dtype == torch.float8_e4m3fn:
            kv_scales = load_kv_scales(checkpoint_files(options.model_dir), config)
        weights = load_weights(options.model_dir, config, dtype, device, progress, rounding)
        block_nbytes = block_nbytes_of(config, options.block_size, kv_dtype)
        memory: GpuMemory | None = None
        if device.type == "cuda":
            from kvrelay.engine.backends.cuda.build import cuda_model, measure_memory  # noqa: PLC0415 - a CPU worker may lack Triton

            # Also where the pool's size is given: kernels are compiled, and what does not fit is found, at the start.
            memory = measure_memory(config, weights, kv_dtype, device, options)
        num_blocks = num_blocks_of(options, block_nbytes, memory)
        max_model_len = min(
            config.max_position_embeddings,
            options.max_model_len or config.max_position_embeddings,
            num_blocks * options.block_size,
        )
        try:
            num_spare, staging = 0, None
            if device.type == "cuda":
                num_spare, staging = NUM_SPARE_BLOCKS, StagingPlan(CudaCopies(device), options.staging_bytes)
            pool = KvPool(
                config, num_blocks, options.block_size, kv_dtype, device, num_spare=num_spare, staging=staging
            )
        except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(
                f"a KV pool of {num_blocks} blocks of {block_nbytes / 2**20:.2f} MiB does not fit the memory ({error}): "
                "lower --num-blocks or --kv-memory-mb"
            ) from error
        digest = weights_digest(options.model_dir) + ("" if rounding is None else f"-{rounding.value}")
        card = ModelCard(
            layout=config.layout(
                options.model_id,
                digest,
                str(kv_dtype).removeprefix("torch."),
                options.block_size,
                kv_scales="" if kv_scales is None else kv_scales_digest(kv_scales),
            ),
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_nbytes=block_nbytes,
            device_type=device.type,
            processors=tuple(options.processors),
        )
        if device.type == "cpu":
            ops = cpu_ops(options, config, pool.tensor, max_model_len, has_int8_weights=rounding is not None)
            return cls(card, DecoderModel(config, weights, ops), ops, pool, options, None)
        model, cuda_ops, graphs = cuda_model(config, weights, pool, max_model_len, options, kv_scales)
        return cls(card, model, cuda_ops, pool, options, graphs)

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

    def check_device(self) -> None:
        """See Engine. An error of CUDA's own stays: whatever the process asks of the device fails from then on."""
        try:
            (there,) = self._ops.upload((np.zeros(1, dtype=np.int64),))
            there.tolist()
        except torch.OutOfMemoryError:
            pass  # who asks for less may get it
        except RuntimeError as error:
            raise DeviceFailedError(f"{self._device} does not even read a number back: {error}") from error

    @property
    def runs_ahead(self) -> bool:
        """See Engine. A CPU has nobody to launch a step while another one runs."""
        if self._options.run_ahead == "auto":
            return self._device.type == "cuda"
        return self._options.run_ahead == "on"

    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        """See Engine."""
        return self.launch(rows).wait()

    @torch.inference_mode()
    def launch(self, rows: Seq[StepRow], behind: LaunchedStep | None = None) -> LaunchedStep:
        """See Engine."""
        if not rows:
            return DoneStep([])
        if torch.get_num_threads() != self._options.num_threads:
            torch.set_num_threads(self._options.num_threads)  # the count is the calling thread's
        assert behind is None or isinstance(behind, TorchStep), behind
        # A deferred one has no tokens to go on from, and its logits may lie where this step's will.
        assert behind is None or not behind.is_deferred, "the step in front was not told to sample"
        batch = build_batch(rows, self._card.layout.block_size, None if behind is None else behind.places)
        try:
            return self._launch(batch, behind)
        except Exception:
            if self._device.type == "cuda":  # what is queued already must not write to blocks that are released now
                with contextlib.suppress(RuntimeError):
                    torch.cuda.current_stream(self._device).synchronize()
            raise

    def _launch(self, batch: Batch, behind: TorchStep | None) -> TorchStep:
        copied = self._pool.order_steps()
        token_ids = self._token_ids(batch, behind)
        hidden, logits = self._forward(batch, token_ids)
        sampled: Sampled | Deferred | None = None
        if hidden is not None:
            add_prompt_logprobs(batch, hidden, self._model.logits)
        if logits is not None:
            sequences = [batch.rows[index].sequence for index in batch.sampling_rows]
            if behind is not None and any(one.needs_host_to_sample for one in sequences):
                sampled = Deferred(partial(self._sample_deferred, batch, logits))
            else:
                under_way = self._under_way(batch, token_ids)
                sampled = sample(logits, sequences, self._ops, self._options.processors, under_way)
        return TorchStep(batch, sampled, self._device, copied)

    @torch.inference_mode()
    def _sample_deferred(self, batch: Batch, logits: torch.Tensor) -> Sampled:
        """Sample with all tokens known: the sequences have taken in those of the step in front."""
        sequences: list[Sequence] = []
        for index in batch.sampling_rows:
            sequence = batch.rows[index].sequence
            if sequence.status is SequenceStatus.FINISHED:
                # Its token does not count: a greedy one asks no guide and counts no tokens.
                sequence = Sequence(*sequence.key, [0], 1, SamplingParams(max_tokens=1, temperature=0.0), 0.0)
            else:
                num_known = int(batch.seq_lens[index])
                assert sequence.num_tokens == num_known, (
                    f"{sequence.key}: {sequence.num_tokens} tokens, not {num_known}"
                )
            sequences.append(sequence)
        return sample(logits, sequences, self._ops, self._options.processors)

    def _token_ids(self, batch: Batch, behind: TorchStep | None) -> torch.Tensor:
        """The step's input ``[num_tokens]``, on the device."""
        if batch.fed_from is None or behind is None:
            return self._ops.upload((batch.token_ids,))[0]
        token_ids, fed_from = self._ops.upload((batch.token_ids, batch.fed_from))
        return behind.fed_to(fed_from, token_ids)

    def _under_way(self, batch: Batch, token_ids: torch.Tensor) -> UnderWay | None:
        """Which tokens of the rows that sample came from the step in front."""
        if batch.fed_from is None:
            return None
        # Whoever is fed by the step in front has one token in this one, and samples behind it; see DecodeScheduler.ahead.
        assert len(batch.sampling_rows) == len(token_ids), "a step ahead computes one token of each row"
        return UnderWay([batch.rows[index].num_ahead for index in batch.sampling_rows], token_ids)

    def _last_tokens(self, batch: Batch) -> torch.Tensor:
        """The places of the last tokens of all rows that sample among the step's tokens, on the device."""
        return self._ops.upload((batch.query_start_loc[1:][batch.sampling_rows] - 1,))[0]

    def _forward(self, batch: Batch, token_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Hidden states of all tokens, unless nobody looks at them, and the logits of the rows that sample, if any do."""
        if self._graphs is not None and self._graphs.fits(batch):
            return None, self._graphs.run(batch, token_ids)
        hidden = self._model.forward(token_ids, self._ops.begin_step(batch))
        if not batch.sampling_rows:
            return hidden, None
        if len(batch.sampling_rows) == len(token_ids):
            return hidden, self._model.logits(hidden)
        return hidden, self._model.logits(hidden[self._last_tokens(batch)])
