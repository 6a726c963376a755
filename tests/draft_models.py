"""Draft models for tests, over fake engines: their drafts are sometimes wrong, and their blocks are checked."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.draft_model import DraftModel
from kvrelay.decode_worker.drafter import Wanted
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.step import Share
from kvrelay.engine.step.interface import Engine
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence


class MistakenEngine(FakeEngine):
    """A fake engine that replaces about one sampled token in ``num_right`` + 1 by a wrong one."""

    def __init__(self, num_right: int, **card: Any) -> None:
        super().__init__(fake_card(**card))
        self._num_right = num_right
        self._draws = random.Random(5)

    def _run(self, share: Share, mask: bytes | None) -> RowResult:
        result = super()._run(share, mask)
        if result.tokens and self._draws.randrange(self._num_right + 1) == 0:
            return RowResult((SampledToken((result.tokens[0].token_id + 1) % self.card.vocab_size),))
        return result


class CheckedDraftModel(DraftModel):
    """A draft model that checks its blocks at every call, and fails the test if drafting failed."""

    def __init__(self, engine: Engine, vocab_size: int, **options: Any) -> None:
        chosen = {"max_step_tokens": 64, "clock": lambda: 0.0, "metrics": DraftMetrics(CollectorRegistry()), **options}
        super().__init__(engine, vocab_size, **chosen)
        self.most_used = 0  # blocks

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        self.check_integrity()
        drafts = super().propose(wanted)
        assert self._num_failures == 0, "the draft model failed, see the log"
        self.check_integrity()
        self.most_used = max(self.most_used, self.blocks.ledger().num_running)
        return drafts

    def assert_nothing_held(self) -> None:
        self.check_integrity()
        assert not self.blocks.owners()
