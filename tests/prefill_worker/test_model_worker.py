"""The model thread's part: what steps take is measured, and the next step follows from it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.block_manager import BlockManager
from kvrelay.engine.fake import FakeEngine, fake_card
from kvrelay.engine.interface import StepRow
from kvrelay.engine.metrics import EngineMetrics
from kvrelay.engine.sequence import Sequence
from kvrelay.prefill_worker.model_worker import Add, PrefillModelWorker, Report
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

CARD = fake_card(num_blocks=512)


class Clock:
    """What the model thread reads the time from."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class TimedEngine(FakeEngine):
    """A step takes 10 ms, and 5 ms for each token."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(CARD)
        self._time = clock

    def step(self, rows: list[StepRow]) -> list[SampledToken | None]:  # type: ignore[override]
        self._time.now_s += 0.01 + 0.005 * sum(row.num_tokens for row in rows)
        return super().step(rows)


def test_the_next_step_follows_from_what_steps_took() -> None:
    clock = Clock()
    blocks = BlockManager(CARD.num_blocks, CARD.layout.block_size, lambda: 0.0)
    settings = PrefillSchedulerSettings(max_batched_tokens=256, ttft_budget_ms=1000)
    scheduler = PrefillScheduler(settings, blocks, CARD.max_model_len)
    metrics = EngineMetrics(CollectorRegistry(), blocks, num_running=lambda: 0, num_waiting=lambda: 0)
    reports: list[Report] = []
    worker = PrefillModelWorker(TimedEngine(clock), scheduler, metrics, reports.append, clock)

    def add(name: str, length: int) -> None:
        tokens = [len(name), *range(1, length)]
        made = Sequence(name, 1, tokens, length, SamplingParams(max_tokens=1, temperature=0.0), clock.now_s)
        made.block_hashes = chain_hashes(root_hash(CARD.layout.fingerprint()), tokens, CARD.layout.block_size)
        worker.handle(Add(made))

    add("long", 1500)
    for _ in range(6):
        assert worker.step()
    sizes = [report.num_tokens for report in reports if report.num_tokens]
    assert sizes[:3] == [256] * 3
    assert sizes[-1] <= 52  # (250 ms - 10 ms) / 5 ms = 48, and what was not yet known of the fixed part
    add("short", 20)
    assert worker.step()
    assert [(item.sequence.request_id, item.token is not None) for item in reports[-1].computed] == [
        ("short", True),
        ("long", False),
    ]
