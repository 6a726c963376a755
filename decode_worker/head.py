"""The drafter that asks an EAGLE-3 head, or the checkpoint's own layer, which read hidden states in the worker's engine.

A stream gets drafts once this worker has computed some of its tokens; after a hand-off these are generated ones. Drafts are sampled
with the request's own parameters and noise, as with a draft model. A failure costs drafts, but no request. Model thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvrelay.common.clock import Clock
from kvrelay.decode_worker.drafter import Wanted
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.row_cost import RowCost
from kvrelay.engine.step.interface import DeviceFailedError, DraftHead, HeadAsk
from kvrelay.engine.step.sequence import Sequence

logger = logging.getLogger(__name__)

_NUM_IDLE = 2000  # after so many steps without a draft, measured costs are forgotten
_MAX_FAILURES = 3  # in a row; then there are no drafts any more


class HeadDrafter:
    """Implements :class:`kvrelay.decode_worker.drafter.Drafter`."""

    num_trusted = 2

    def __init__(
        self, name: str, head: DraftHead, slot_of: Callable[[Sequence], int | None], clock: Clock, metrics: DraftMetrics
    ) -> None:
        """``name``: "head" or "mtp". ``slot_of``: see Leader."""
        self.name = name
        self._head = head
        self._slot_of = slot_of
        self._clock = clock
        self._metrics = metrics
        self._cost = RowCost()
        self._num_idle = 0  # steps since the last draft
        self._num_failures = 0  # in a row

    def step_s(self, num_sequences: int) -> float:
        """See Drafter."""
        return self._cost.step_s(num_sequences) or 0.0

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """See Drafter."""
        self._num_idle += 1
        if self._num_idle > _NUM_IDLE:
            self._cost, self._num_idle = RowCost(), 0
        asks: dict[Sequence, HeadAsk] = {}
        num_places = wanted.num_places
        for sequence, most in wanted.num_tokens.items():
            num_wanted = min(most, num_places)
            slot = self._slot_if_ready(sequence, sequence.num_tokens)
            if slot is not None and num_wanted > 0:
                asks[sequence] = HeadAsk(slot, sequence.token_ids, num_wanted)
                num_places -= num_wanted
        return self._draft(asks) if asks else {}

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...] | None:
        """See Drafter."""
        return () if self._slot_if_ready(sequence, sequence.num_tokens + 1) is None else None

    def forget(self, sequence: Sequence) -> None:
        """See Drafter. The head's state of the sequence goes with the engine's slot."""

    def _slot_if_ready(self, sequence: Sequence, num_tokens: int) -> int | None:
        """The engine's slot of the sequence, if the head can draft after ``num_tokens`` tokens; else None."""
        slot = self._slot_of(sequence)
        if slot is None or self._num_failures >= _MAX_FAILURES or not self._head.can_draft(slot, num_tokens):
            return None
        return slot

    def _draft(self, asks: Mapping[Sequence, HeadAsk]) -> Mapping[Sequence, tuple[int, ...]]:
        begun_s = self._clock()
        try:
            drafts = self._head.draft(list(asks.values()))
        except DeviceFailedError:
            return {}  # the next step fails for the same reason, says it, and ends the worker
        except Exception:
            self._num_failures += 1
            self._metrics.failures.inc()
            if self._num_failures >= _MAX_FAILURES:
                self._head.give_up()
            what_next = "there are no drafts any more" if self._num_failures >= _MAX_FAILURES else "it is asked again"
            logger.exception("guessing failed; requests go on without drafts, and %s", what_next)
            return {}
        step_s = self._clock() - begun_s
        self._metrics.computed("drafts", step_s)
        if num_steps := max(map(len, drafts)):
            self._cost.observe(len(asks), step_s / num_steps)
            self._num_idle = self._num_failures = 0
        return dict(zip(asks, drafts, strict=True))
