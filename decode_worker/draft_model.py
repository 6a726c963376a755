"""The drafter that asks a smaller model with the same tokens. It computes in the decode worker, beside the worker's model.

It has its own engine, pool and blocks (:mod:`kvrelay.decode_worker.draft_sequences`). No fingerprint and no hand-off includes them.
So it first computes each text itself, prompt included, in chunks beside steps and within the time that prompts may take. Only a
sequence whose text is nearly computed gets a draft. Each token of the drafts takes one step of the draft model, for all sequences
together. Drafts are sampled like the model's own tokens, with the same noise. So a draft token is right or wrong, unlike in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, which accepts drafts by chance.

Steps of the draft model never overlap with the worker's. A failure costs drafts, but no request. Model thread only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvrelay.common.block_hash import HashChain
from kvrelay.common.clock import Clock
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.draft_sequences import DraftSequences
from kvrelay.decode_worker.drafter import Wanted
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.row_cost import RowCost
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.step_cost import StepCosts

logger = logging.getLogger(__name__)

_NUM_LACKING = 8  # most text tokens that are computed with a draft's first token
_FEWEST_TOKENS = 8  # least tokens of a chunk, so that texts always advance
_UNKNOWN_TOKENS = 32  # tokens of the first chunks
_GROWTH = 1.25  # largest chunk to try, relative to those measured
_NUM_IDLE = 2000  # after so many steps without a draft, costs are reset to those at the start
_MAX_FAILURES = 3  # in a row; then there are no drafts any more


class DraftModel:
    """Implements :class:`kvrelay.decode_worker.drafter.Drafter`."""

    name = "draft-model"
    num_trusted = 2

    def __init__(
        self, engine: Engine, vocab_size: int, max_step_tokens: int, clock: Clock, metrics: DraftMetrics
    ) -> None:
        """``engine``: the draft model's. ``vocab_size``: of the worker's model. ``max_step_tokens``: most tokens of a chunk."""
        card = engine.card
        windows = card.layout.geometry.windows
        self.blocks = BlockManager(card.num_blocks * len(windows), card.layout.block_size, clock, windows=windows)
        self._sequences = DraftSequences(self.blocks, card.max_model_len, card.vocab_size)
        self._leader = Leader(engine)
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._metrics = metrics
        self._chunk_costs = StepCosts()
        self._cost = RowCost()
        self._first_cost = RowCost()  # measured at the start
        self._num_idle = 0  # steps since the last draft
        self._num_failures = 0  # in a row

    def measure(self) -> None:
        """Measure the cost of drafts with a dummy sequence, before the first real draft. Takes about a second."""
        num_tokens = _UNKNOWN_TOKENS + _NUM_LACKING
        nobody = Sequence(
            "nobody", 0, [0] * num_tokens, num_tokens, SamplingParams(max_tokens=99, temperature=0.0), 0.0
        )
        nobody.chain = HashChain(b"", self.blocks.block_size)
        for _ in range(6):
            self._propose(Wanted({nobody: 4}, 4, None))
        self.forget(nobody)
        self._first_cost = self._cost.copy()

    def step_s(self, num_sequences: int) -> float:
        """See Drafter."""
        return self._cost.step_s(num_sequences) or 0.0

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...] | None:
        """See Drafter."""
        return None if not self._is_out_of_order and self._sequences.may_follow(sequence) else ()

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._sequences.forget(sequence)

    def check_integrity(self) -> None:
        """Assert that the books agree. Called after every test."""
        self._sequences.check_integrity()

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """See Drafter."""
        if self._is_out_of_order:
            return {}
        self._num_idle += 1
        if self._num_idle > _NUM_IDLE:
            self._cost, self._num_idle = self._first_cost.copy(), 0
        try:
            drafts = self._propose(wanted)
        except Exception:
            self._num_failures += 1
            self._metrics.failures.inc()
            self._sequences.forget_all()
            what_next = "there are no drafts any more" if self._is_out_of_order else "it begins anew"
            logger.exception("the draft model failed; requests go on without, and %s", what_next)
            return {}
        if drafts:
            self._num_idle = self._num_failures = 0
        return drafts

    @property
    def _is_out_of_order(self) -> bool:
        return self._num_failures >= _MAX_FAILURES

    def _propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        # For each: the draft model's sequence, and its number of draft tokens.
        ready: dict[Sequence, tuple[Sequence, int]] = {}
        lacking: list[Sequence] = []
        num_places = wanted.num_places
        for sequence, most in wanted.num_tokens.items():
            own = self._sequences.follow(sequence)
            if own is None:
                continue
            if own.num_uncomputed_tokens > _NUM_LACKING:
                lacking.append(own)
            elif num_tokens := self._num_fitting(own, min(most, num_places)):
                ready[sequence] = own, num_tokens
                num_places -= num_tokens
        self._catch_up(lacking, wanted.spare_s)
        return self._draft(ready)

    def _num_fitting(self, own: Sequence, most: int) -> int:
        """The number of draft tokens, ``most`` at most, that have room. The last one's K/V are not computed."""
        most = min(most, self._leader.engine.card.max_model_len - own.num_tokens)
        if most > 0 and not self._sequences.make_room(own, own.num_tokens + most - 1):
            most = own.num_blocks * self.blocks.block_size - own.num_tokens + 1
        return max(0, most)

    def _catch_up(self, lacking: Seq[Sequence], spare_s: float | None) -> None:
        """Compute the texts of ``lacking``, the most senior first, as far as ``spare_s`` allows."""
        rows: list[StepRow] = []
        num_left = chunk_tokens(self._chunk_costs, spare_s, self._max_step_tokens)
        for own in lacking:
            # Without the last token, which is computed together with the first draft token.
            if num_tokens := min(num_left, own.num_uncomputed_tokens - 1):
                rows.append(StepRow(own, num_tokens))
                num_left -= num_tokens
        if rows:
            begun_s = self._clock()
            self._leader.step(rows)
            step_s = self._clock() - begun_s
            self._chunk_costs.observe(sum(row.num_tokens for row in rows), step_s)
            self._metrics.computed("text", step_s)
            for row in rows:
                row.sequence.num_computed_tokens += row.num_tokens

    def _draft(self, ready: Mapping[Sequence, tuple[Sequence, int]]) -> Mapping[Sequence, tuple[int, ...]]:
        """Compute drafts of the given lengths. A draft ends early at a stop token, or at a token that the worker's model lacks."""
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in ready}
        drafting = list(ready)
        while drafting:
            rows = [StepRow(ready[one][0], ready[one][0].num_uncomputed_tokens) for one in drafting]
            begun_s = self._clock()
            results = self._leader.step(rows)
            step_s = self._clock() - begun_s
            self._cost.observe(len(rows), step_s)
            self._metrics.computed("drafts", step_s)
            going_on: list[Sequence] = []
            for sequence, row, result in zip(drafting, rows, results, strict=True):
                own, draft = row.sequence, drafts[sequence]
                token_id = result.tokens[0].token_id
                own.num_computed_tokens = own.num_tokens
                own.token_ids.append(token_id)
                if token_id < self._vocab_size and token_id not in sequence.sampling.stop_token_ids:
                    draft.append(token_id)
                    if len(draft) < ready[sequence][1]:
                        going_on.append(sequence)
            drafting = going_on
        return {sequence: tuple(draft) for sequence, draft in drafts.items()}


def chunk_tokens(costs: StepCosts, spare_s: float | None, most: int) -> int:
    """Text tokens that one step computes within ``spare_s``; at least a few, and ``most`` at most."""
    if spare_s == math.inf:
        return most
    cost = costs.cost
    if cost is None or spare_s is None:
        return min(most, _UNKNOWN_TOKENS)
    fitting = int((spare_s - cost.fixed_s) / cost.token_s)
    largest = max(_UNKNOWN_TOKENS, int(_GROWTH * costs.largest_step))
    return min(most, max(_FEWEST_TOKENS, min(fitting, largest)))
