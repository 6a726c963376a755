"""The prefill worker's model worker without its thread: prompts, steps and reports."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.clock import Clock
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.lower_tier import LowerTier
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import Engine
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Add, ModelWorker, Report


class ModelRig:
    """A model worker over an engine. A computed prompt's blocks are released at once."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock = lambda: 0.0,
        tier_of: Callable[[BlockManager], LowerTier] | None = None,
        **settings: int,
    ) -> None:
        """``tier_of``: makes a tier below the pool."""
        card = engine.card
        windows = card.layout.geometry.windows
        max_step_tokens = settings.get("max_batched_tokens", 512)
        self.blocks = BlockManager(
            card.num_blocks * len(windows),
            card.layout.block_size,
            lambda: 0.0,
            windows=windows,
            max_step_tokens=max_step_tokens,
            has_states=card.layout.geometry.has_states,
        )
        if tier_of is not None:
            self.blocks.attach(tier_of(self.blocks))
        self.scheduler = PrefillScheduler(
            PrefillSchedulerSettings(**settings), self.blocks, card.max_model_len, "cpu", engine.num_stages
        )
        self.tokens: dict[str, int] = {}  # the first token of each prompt
        self.failed: list[str] = []
        self.reports: list[Report] = []
        self._fingerprint = card.layout.fingerprint()
        metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.worker = ModelWorker(Leader(engine), self.scheduler, metrics, self._hear, clock)

    def _hear(self, report: Report) -> None:
        self.reports.append(report)
        self.failed += [name for name, _ in report.failed]
        for item in report.progress:
            if item.token is not None:
                self.tokens[item.key[0]] = item.token.token_id
        for key in [*report.failed, *(item.key for item in report.progress if item.token is not None)]:
            self.blocks.release(sequence_owner(key))

    def local(self, name: str, prompt: list[int], sampling: SamplingParams, arrival_s: float = 0.0) -> None:
        """Add a prompt to compute."""
        chain = HashChain(self._fingerprint, self.blocks.block_size)
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, arrival_s, chain=chain)
        self.worker.handle(Add(sequence))

    def run(self, *, breaks: bool = False) -> None:
        """Run steps until no work is left. With ``breaks`` a step may fail."""
        for _ in range(1000):
            if not self.worker.has_work():
                break
            try:
                self.worker.step()
            except Exception as error:
                if not breaks:
                    raise
                self.worker.on_step_failed(error)
            self.scheduler.check_integrity()
        assert not self.worker.has_work()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
