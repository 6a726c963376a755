"""The workers of a world: their settings and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, FakePace
from kvrelay.engine.fake.step import Share
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.setup import Setup
from tests.draft_models import MistakenEngine
from tests.drafters import FakeOracle

from .clock import Process
from .ranks import RankedSimEngine, Shape, layered_card
from .threads import SimModelLoop

VOCAB = 1000
LINKS = LinkSettings(ping_interval_s=1.0, peer_timeout_s=4.0, hello_timeout_s=2.0, reconnect_max_s=2.0)

SimEngine = FakeEngine | RankedSimEngine
SimWorker = PrefillWorker | DecodeWorker


@dataclass(frozen=True)
class Machines:
    """The settings of all workers of a world."""

    num_blocks: int = 28  # of each worker
    block_size: int = 4
    seal_kv: bool = False
    windows: tuple[int | None, ...] = (None,)  # of each group of layers
    prefill: PrefillSchedulerSettings = field(
        default_factory=lambda: PrefillSchedulerSettings(max_batched_tokens=16, max_num_seqs=3, max_waiting=8)
    )
    decode: DecodeSchedulerSettings = field(
        default_factory=lambda: DecodeSchedulerSettings(
            max_num_seqs=3, max_batched_tokens=16, max_waiting=8, lease_ttl_s=5.0
        )
    )
    pace: FakePace | None = None  # None: steps take a moment by chance; else nothing runs ahead or is read back twice
    drafts: bool = False  # decode workers speculate (d0 by a draft model), and some drafts are wrong
    checks_books: bool = True  # check every worker's blocks after each of its events
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # by worker; only those with several ranks

    def engine(self, name: str, process: Process) -> SimEngine:
        """The engine of worker ``name`` in ``process``."""
        card = layered_card(
            num_blocks=self.num_blocks, block_size=self.block_size, vocab_size=VOCAB, windows=self.windows
        )
        if (shape := self.shapes.get(name)) is not None:
            return RankedSimEngine(card, shape, process)
        if (pace := self.pace) is None:
            # Of each role one worker has steps under way while other events happen. p0 does so as with two stages, d0 as on a
            # GPU: it launches its next step before it knows the last step's tokens.
            return FakeEngine(card, runs_ahead=name == "d0", num_stages=2 if name == "p0" else 1)

        def take_time(shares: Sequence[Share]) -> None:
            process.ahead_s += pace.of(shares)

        return FakeEngine(card, take_time, reads_back_once=True)

    def worker(
        self, engine: SimEngine, name: str, epoch: int, registry: CollectorRegistry, network: Network
    ) -> SimWorker:
        """Worker ``name`` in its ``epoch``-th process. Not started."""
        model_loop = cast(Any, SimModelLoop)
        setup = Setup(name, epoch, f"tcp://{name}:1", registry, network, model_loop, LINKS, seal_kv=self.seal_kv)
        if name[0] == "p":
            return PrefillWorker(engine, self.prefill, setup)
        draft_engine = self._draft_engine() if self.drafts and name == "d0" else None
        drafters = [FakeOracle(VOCAB)] if self.drafts and draft_engine is None else []
        return DecodeWorker(engine, self.decode, f"tcp://{name}:2", setup, drafters, draft_engine)

    def _draft_engine(self) -> FakeEngine:
        """A draft engine with fewer blocks than its worker may need."""
        return MistakenEngine(
            4, num_blocks=self.num_blocks // 2 + 12, block_size=self.block_size, vocab_size=VOCAB, windows=self.windows
        )
