"""Drives a loaded engine like its worker's model thread: the real scheduler and loop body, without sockets."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from gpu_parts.engine.model_dir import model_directory
from gpu_parts.frame.running import Context
from gpu_parts.frame.sizes import BLOCK_SIZE
from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Add, ModelWorker, Remove, Report

_SEEDED_BLOCKS = 32  # blocks of random bytes; all others are copies
_COPIED_AT_ONCE = 512


def load_engine(
    context: Context,
    num_blocks: int,
    *,
    max_num_seqs: int,
    max_batched_tokens: int,
    decodes: bool,
    weight_format: str = "full",
    directory: Path | None = None,
) -> TorchEngine:
    """Load a model on the measured device, as a worker with such a scheduler does. ``directory``: None for the run's model."""
    directory = model_directory(context) if directory is None else directory
    options = EngineOptions(
        directory,
        directory.name,
        device=context.device_type,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        decodes=decodes,
        weight_format=weight_format,
        num_threads=1,
    )
    return TorchEngine.load(options, lambda done, total: None)


def fill_pool(engine: TorchEngine, generator: torch.Generator) -> None:
    """Fill every block with random keys and values, because a device computes faster on zeros."""
    store, dtype = engine.store, getattr(torch, engine.card.layout.geometry.groups[0].dtype)
    num_seeded = min(_SEEDED_BLOCKS, store.num_blocks)
    count = store.block_nbytes // dtype.itemsize
    for block_id in range(num_seeded):
        values = torch.empty(count, dtype=dtype, device=generator.device).normal_(generator=generator)
        store.open_write(block_id, 0)[:] = values.view(torch.uint8).cpu().numpy().data
        store.close_write(block_id)
    for first in range(num_seeded, store.num_blocks, _COPIED_AT_ONCE):
        targets = range(first, min(first + _COPIED_AT_ONCE, store.num_blocks))
        engine.copy_blocks([(target % num_seeded, target) for target in targets])


class DecodeDriver:
    """A decode worker's model thread without the thread."""

    def __init__(self, engine: TorchEngine, *, settings: DecodeSchedulerSettings, seed: int) -> None:
        """Takes over the engine's blocks; one driver per engine at a time."""
        card = engine.card
        self._vocab_size = card.vocab_size
        self._fingerprint = card.layout.fingerprint()
        self._blocks = BlockManager(card.num_blocks, card.layout.block_size, lambda: 0.0)
        self._scheduler = DecodeScheduler(settings, self._blocks, card.max_model_len, card.device_type)
        metrics = _metrics(self._blocks)
        self._worker = ModelWorker(Leader(engine), self._scheduler, metrics, self._hear, time.monotonic)
        self._random = torch.Generator().manual_seed(seed)
        self._num_added = 0
        self.num_tokens = 0  # sampled so far

    def add_computed(self, prompt_len: int, max_tokens: int) -> None:
        """Add a handed-over sequence: its prompt's K/V count as computed, and it has its first token."""
        tokens = _random_tokens(prompt_len + 1, self._vocab_size, self._random)
        sequence = self._sequence(tokens, prompt_len, max_tokens)
        num_blocks = -(-(prompt_len + 1) // BLOCK_SIZE)
        allocation = self._blocks.allocate(sequence_owner(sequence.key), num_blocks)
        assert allocation is not None, f"{num_blocks} blocks in a pool of {self._blocks.num_blocks}"
        sequence.block_tables = allocation.block_tables
        sequence.num_computed_tokens = prompt_len
        self._worker.handle(Add(sequence))

    def add_prompt(self, prompt_len: int, max_tokens: int) -> None:
        """Add a sequence to prefill here."""
        tokens = _random_tokens(prompt_len, self._vocab_size, self._random)
        self._worker.handle(Add(self._sequence(tokens, prompt_len, max_tokens)))

    def step(self) -> float:
        """One turn of the loop; its wall seconds. It takes the results of earlier steps; the next step may still run."""
        begun_s = time.perf_counter()
        assert self._worker.step(), "there is work, and no room for it"
        return time.perf_counter() - begun_s

    def run(self) -> float:
        """Run until every sequence has ended; seconds."""
        begun_s = time.perf_counter()
        while self._worker.has_work():
            assert self._worker.step(), "there is work, and no room for it"
        return time.perf_counter() - begun_s

    def clear(self) -> None:
        """Remove all sequences, even those in a running step."""
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._worker.handle(Remove(sequence.key))
        while self._worker.has_work():
            self._worker.step()
        self._scheduler.check_integrity()

    def _sequence(self, tokens: list[int], prompt_len: int, max_tokens: int) -> Sequence:
        self._num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        arrival_s = float(self._num_added)
        chain = HashChain(self._fingerprint, BLOCK_SIZE)
        return Sequence(f"r{self._num_added}", 1, tokens, prompt_len, sampling, arrival_s, chain=chain)

    def _hear(self, report: Report) -> None:
        assert not report.failed, report.detail
        self.num_tokens += sum(1 for token in report.progress if token.token is not None)


class PrefillDriver:
    """A prefill worker's model thread without the thread."""

    def __init__(self, engine: TorchEngine, *, settings: PrefillSchedulerSettings, seed: int) -> None:
        """Takes over the engine's blocks; one driver per engine at a time."""
        card = engine.card
        self._vocab_size = card.vocab_size
        self._fingerprint = card.layout.fingerprint()
        self._blocks = BlockManager(card.num_blocks, card.layout.block_size, lambda: 0.0)
        scheduler = PrefillScheduler(settings, self._blocks, card.max_model_len, card.device_type)
        self._worker = ModelWorker(Leader(engine), scheduler, _metrics(self._blocks), self._hear, time.monotonic)
        self._random = torch.Generator().manual_seed(seed)
        self._num_added = 0
        self._num_computed = 0
        self.num_steps = 0  # so far

    def prefill(self, prompt_len: int) -> float:
        """Wall seconds of one fresh prompt until its first token."""
        self._num_added += 1
        tokens = _random_tokens(prompt_len, self._vocab_size, self._random)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        chain = HashChain(self._fingerprint, BLOCK_SIZE)
        sequence = Sequence(f"p{self._num_added}", 1, tokens, prompt_len, sampling, 0.0, chain=chain)
        begun_s = time.perf_counter()
        self._worker.handle(Add(sequence))
        while self._num_computed < self._num_added:
            assert self._worker.step(), "there is work, and no room for it"
        seconds = time.perf_counter() - begun_s
        self._blocks.release(sequence_owner(sequence.key))
        return seconds

    def _hear(self, report: Report) -> None:
        assert not report.failed, report.detail
        self.num_steps += bool(report.progress)
        self._num_computed += sum(1 for computed in report.progress if computed.token is not None)


def _metrics(blocks: BlockManager) -> EngineMetrics:
    return EngineMetrics(CollectorRegistry(), blocks, num_running=lambda: 0, num_waiting=lambda: 0)


def _random_tokens(count: int, vocab_size: int, generator: torch.Generator) -> list[int]:
    tokens: list[int] = torch.randint(3, vocab_size, (count,), generator=generator).tolist()
    return tokens
