"""A device that fails for good ends both kinds of worker at the first step that shows it, and not at the tenth."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.model_worker import Add as DecodeAdd
from kvrelay.decode_worker.model_worker import DecodeModelWorker
from kvrelay.engine.block_manager import BlockManager
from kvrelay.engine.fake import FakeEngine, fake_card
from kvrelay.engine.interface import DeviceFailedError, LaunchedStep, StepRow
from kvrelay.engine.loop import ModelLoop
from kvrelay.engine.metrics import EngineMetrics
from kvrelay.engine.sequence import Sequence
from kvrelay.prefill_worker.model_worker import Add as PrefillAdd
from kvrelay.prefill_worker.model_worker import PrefillModelWorker, Report
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from tests.decode_worker.rig import Rig

CARD = fake_card()
ROOT = root_hash(CARD.layout.fingerprint())
WAIT_S = 30.0


class FailingEngine(FakeEngine):
    """No step succeeds; with ``is_lost``, since the device is gone."""

    def __init__(self, *, is_lost: bool) -> None:
        super().__init__(CARD)
        self._is_lost = is_lost

    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        raise RuntimeError("an illegal memory access")

    def launch(self, rows: Seq[StepRow], behind: LaunchedStep | None = None) -> LaunchedStep:
        raise RuntimeError("an illegal memory access")

    def check_device(self) -> None:
        if self._is_lost:
            raise DeviceFailedError("an illegal memory access")


def decode_worker(engine: FailingEngine, failed: list[str]) -> DecodeModelWorker:
    rig = Rig(engine)
    rig.failed = failed
    return rig.worker


def prefill_worker(engine: FailingEngine, failed: list[str]) -> PrefillModelWorker:
    blocks = BlockManager(CARD.num_blocks, CARD.layout.block_size)
    scheduler = PrefillScheduler(PrefillSchedulerSettings(), blocks, CARD.max_model_len)
    metrics = EngineMetrics(CollectorRegistry(), blocks, num_running=lambda: 0, num_waiting=lambda: 0)

    def hear(report: Report) -> None:
        failed.extend(name for name, _ in report.failed)

    return PrefillModelWorker(engine, scheduler, metrics, hear)


@pytest.mark.parametrize(("make", "add"), [(decode_worker, DecodeAdd), (prefill_worker, PrefillAdd)])
def test_it_ends_the_loop_at_once(
    make: Callable[[FailingEngine, list[str]], Any], add: Callable[[Sequence], Any]
) -> None:
    for is_lost, expected in ((True, ["r0"]), (False, [f"r{index}" for index in range(10)])):
        failed: list[str] = []
        worker = make(FailingEngine(is_lost=is_lost), failed)
        loop = ModelLoop[Any](worker, "model")
        loop.start()
        for index in range(10):
            sequence = Sequence(f"r{index}", 1, [1, 2, 3], 3, SamplingParams(max_tokens=9, temperature=0.0), 0.0)
            sequence.block_hashes = chain_hashes(ROOT, sequence.token_ids, CARD.layout.block_size)
            loop.post(add(sequence))
            # Each alone in its step, as far as there is one.
            for _ in range(int(WAIT_S / 0.001)):
                if len(failed) > index or not loop.is_alive:
                    break
                loop._thread.join(0.001)
        loop._thread.join(WAIT_S)
        assert not loop.is_alive
        assert failed == expected
