"""A head beside a model, or the checkpoint's own layer for drafting: keeps the model's hidden states, slot by slot, and drafts.

It sees only what this engine has computed itself. Each slot has a *stretch* of text that begins at the first place whose hidden
states were computed here. After a hand-off that is the generated text; after local prefill it includes the prompt. The head's K/V
of a stretch are in its own pool, in fixed blocks for each slot. Places count from 0, because rotations depend only on distances. A
stretch that has grown too long starts again. Nothing of this leaves the engine.

A ring keeps the fused hidden states of the last single tokens until a draft is wanted. By then the next token is known, and which
guesses were right. So a step costs little if the head is not asked. Use this on the model thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.engine.models.decoder import DecoderModel, Taps
from kvrelay.engine.models.guesser import Guesser
from kvrelay.engine.models.ops import LatentStep, Ops, StepContext
from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.interface import HeadAsk
from kvrelay.engine.step.plan import PlanRow, StepPlan, TableDelta
from kvrelay.engine.step.slots import LOGPROBS, PROCESSORS, Ints, Slots

logger = logging.getLogger(__name__)

_FEWEST = 4  # fewest places of a stretch: with fewer a head is wrong too often
_NUM_KEPT = 64  # places of a slot in the ring; more than the guesses of a step


@dataclass(slots=True)
class _Stretch:
    """A range of a slot's text, counted from the text's beginning: ``first`` <= ``done`` <= ``end``."""

    first: int = 0
    done: int = 0  # before this place, K/V are in the pool
    end: int = 0  # before this place, the ring has hidden states, perhaps of wrong guesses, too

    def begin(self, place: int) -> None:
        """Start again at ``place``. The ring keeps what it has from there on."""
        self.first = self.done = place


@dataclass(frozen=True, slots=True)
class _Run:
    """Places of one slot for the head to compute, from ``start`` on, counted from the stretch's first."""

    slot: int
    start: int
    token_ids: Seq[int]  # the tokens after the places


def ring_shape(width: int, num_slots: int) -> tuple[int, int]:
    """The shape of the ring of hidden states, in the model's type. ``width``: see Guesser."""
    return num_slots * _NUM_KEPT, width


class HeadBesideModel:
    """Implements :class:`kvrelay.engine.step.interface.DraftHead`."""

    def __init__(
        self, model: Guesser, ops: Ops, target: DecoderModel, slots: Slots, num_blocks: int, block_size: int
    ) -> None:
        """``ops``: operations over the head's pool, which has ``num_blocks`` for each of the engine's ``slots``."""
        self._model = model
        self._ops = ops
        self._target = target
        self._slots = slots
        self._block_size = block_size
        self._most = num_blocks * block_size  # places of a stretch
        num_slots = len(slots.sequences)
        self._tables: Ints = np.arange(num_slots * num_blocks, dtype=np.int64).reshape(1, num_slots, num_blocks)
        # Sent once, with the first batch that is computed.
        self._deltas = tuple(TableDelta(slot, 0, tuple(self._tables[0, slot].tolist())) for slot in range(num_slots))
        self._stretches = [_Stretch() for _ in range(num_slots)]
        self._ring = torch.zeros(*ring_shape(model.width, num_slots), dtype=target.dtype, device=target.device)
        self._has_failed = False

    def apply(self, plan: StepPlan) -> None:
        """Reset the stretches of slots that new sequences join."""
        for join in plan.joins:
            self._stretches[join.slot] = _Stretch()

    def forward(self, token_ids: torch.Tensor, step: StepContext | LatentStep, batch: Batch) -> torch.Tensor | None:
        """The model's forward pass; keeps the hidden states that the head needs. Fails only if the model does."""
        if self._has_failed:
            return self._target.forward(token_ids, step)
        taps = Taps(self._model.taps)
        hidden = self._target.forward(token_ids, step, taps)
        assert hidden is not None, "a stage has no head"
        self.hear(batch, (*taps.found, hidden))
        return hidden

    def hear(self, batch: Batch, states: Seq[torch.Tensor]) -> None:
        """Keep what the head needs of a step. ``states``: see :meth:`StepGraphs.heard`. Fails only if other ranks would wait."""
        if self._has_failed:
            return
        try:
            self._hear(batch, self._model.fuse(states[:-1], states[-1]))
        except Exception:
            if self._model.has_collectives:
                raise  # the other ranks would wait for this one
            self.give_up()
            logger.exception("guessing failed beside a step; requests go on, and there are no drafts any more")

    def give_up(self) -> None:
        """See DraftHead."""
        self._has_failed = True

    def told(self, asks: Seq[HeadAsk]) -> tuple[HeadAsk, ...]:
        """The asks for another rank, each with only those tokens that the slot does not have."""
        return tuple(replace(ask, token_ids=tuple(ask.token_ids[self._num_known(ask) :])) for ask in asks)

    def draft_told(self, asks: Seq[HeadAsk]) -> None:
        """``draft`` what the leader has ``told``, on another rank."""
        self.draft(
            [replace(ask, token_ids=[*self._slots.sequences[ask.slot].token_ids, *ask.token_ids]) for ask in asks]
        )

    def can_draft(self, slot: int, num_tokens: int) -> bool:
        """See DraftHead."""
        stretch, end = self._stretches[slot], num_tokens - 1
        return not self._has_failed and stretch.done < end <= stretch.end and end - stretch.first >= _FEWEST

    @torch.inference_mode()
    def draft(self, asks: Seq[HeadAsk]) -> list[tuple[int, ...]]:
        """See DraftHead."""
        drafts: list[list[int]] = [[] for _ in asks]
        runs: dict[int, _Run] = {}  # by index of the ask
        for place, ask in enumerate(asks):
            stretch = self._stretches[ask.slot]
            if len(ask.token_ids) - stretch.first + ask.num_wanted > self._most:
                stretch.begin(stretch.done)
            if len(ask.token_ids) - stretch.first + ask.num_wanted > self._most:
                stretch.begin(len(ask.token_ids) - 1)  # too many places wait in the ring
            if self.can_draft(ask.slot, len(ask.token_ids)):
                behind = ask.token_ids[stretch.done + 1 :]
                runs[place] = _Run(ask.slot, stretch.done - stretch.first, behind)
        going_on = sorted(runs, key=lambda place: len(runs[place].token_ids) > 1)  # single tokens come first in a batch
        hidden = self._ring[self._kept([runs[place] for place in going_on])]
        while going_on:
            hidden, tokens = self._guess([asks[place] for place in going_on], hidden, [runs[place] for place in going_on],
                                         [drafts[place] for place in going_on])  # fmt: skip
            is_left: list[int] = []
            for row, (place, token_id) in enumerate(zip(going_on, tokens, strict=True)):
                run, ask = runs[place], asks[place]
                if not drafts[place]:
                    self._stretches[ask.slot].done = len(ask.token_ids) - 1
                drafts[place].append(token_id)
                runs[place] = _Run(run.slot, run.start + len(run.token_ids), (token_id,))
                if len(drafts[place]) < ask.num_wanted:
                    is_left.append(row)
            hidden = hidden[is_left]
            going_on = [going_on[row] for row in is_left]
        return [tuple(draft) for draft in drafts]

    def _guess(
        self, asks: Seq[HeadAsk], hidden: torch.Tensor, runs: Seq[_Run], drafts: Seq[list[int]]
    ) -> tuple[torch.Tensor, list[int]]:
        """One token for each ask, after its ``runs``; and the hidden states for the next guess."""
        batch = self._batch(runs)
        next_ids, last = self._ops.upload((batch.token_ids, batch.query_start_loc[1:] - 1))
        hidden, logits = self._model.forward(hidden, next_ids, self._begin_step(batch), last)
        behind = [
            (*ask.token_ids[self._num_known(ask) :], *draft) for ask, draft in zip(asks, drafts, strict=True)
        ]  # tokens that the slots do not have
        places = np.array([len(ask.token_ids) + len(draft) for ask, draft in zip(asks, drafts, strict=True)])
        asking = Asking.of(self._slots, batch.slots, places, drafts=behind)
        asking = replace(asking, asks=asking.asks & ~(LOGPROBS | PROCESSORS))
        token_ids = self._model.token_ids
        if not asking.asks.any():
            best = self._ops.argmax(logits)
            return hidden, (best if token_ids is None else token_ids[best]).tolist()
        if token_ids is not None:  # the noise chooses in the order of the model's vocabulary
            full = logits.new_full((len(asks), self._model.vocab_size), -torch.inf)
            logits = full.index_copy_(1, token_ids, logits)
        return hidden, sample(logits, asking, None, self._ops, {}).tokens.tolist()

    def _num_known(self, ask: HeadAsk) -> int:
        """How many of the tokens the slot has."""
        return len(self._slots.sequences[ask.slot].token_ids)

    def _hear(self, batch: Batch, fused: torch.Tensor) -> None:
        """Keep a step's hidden states: single tokens' in the ring. For a prompt's chunk, compute all K/V at once."""
        ring_places: list[int] = []
        kept: list[int] = []  # their indices among the step's tokens
        chunks: list[tuple[_Run, torch.Tensor]] = []  # runs to compute at once, with their hidden states
        for row, planned in enumerate(batch.rows):
            stretch, start, end = self._stretches[planned.slot], planned.start, planned.start + planned.num_tokens
            if not planned.draft_tokens and not stretch.done <= start <= stretch.end:
                stretch.begin(start)  # earlier places were not computed here, or are computed again
            stretch.end = end
            if planned.num_tokens > 1:
                if end - stretch.first > self._most:
                    stretch.begin(max(start, end - self._most // 2))
                run = self._known(planned, stretch)
                before = self._ring[self._kept([replace(run, token_ids=run.token_ids[: max(0, start - stretch.done)])])]
                first = int(batch.query_start_loc[row]) + max(0, stretch.done - start)
                chunks.append((run, torch.cat((before, fused[first : first + len(run.token_ids) - len(before)]))))
                stretch.done = end - 1
            elif end - stretch.done > _NUM_KEPT:
                stretch.begin(end - _NUM_KEPT)
            ring_places.append(planned.slot * _NUM_KEPT + (end - 1) % _NUM_KEPT)
            kept.append(int(batch.query_start_loc[row + 1]) - 1)
        there, taken = self._ops.upload((np.array(ring_places), np.array(kept)))
        self._ring.index_copy_(0, there, fused[taken])
        if chunks:
            chunks.sort(key=lambda chunk: len(chunk[1]) > 1)
            own = self._batch([run for run, _ in chunks])
            (token_ids,) = self._ops.upload((own.token_ids,))
            self._model.write(torch.cat([there for _, there in chunks]), token_ids, self._begin_step(own))

    def _known(self, planned: PlanRow, stretch: _Stretch) -> _Run:
        """The places of a chunk whose next token is also in it, and the places before it that have no K/V."""
        behind = self._slots.sequences[planned.slot].token_ids[stretch.done + 1 : planned.start + planned.num_tokens]
        return _Run(planned.slot, stretch.done - stretch.first, behind)

    def _kept(self, runs: Seq[_Run]) -> torch.Tensor:
        """Indices of the places' hidden states in the ring."""
        places = [
            run.slot * _NUM_KEPT + (self._stretches[run.slot].first + run.start + offset) % _NUM_KEPT
            for run in runs
            for offset in range(len(run.token_ids))
        ]
        (there,) = self._ops.upload((np.array(places, dtype=np.int64),))
        return there

    def _begin_step(self, batch: Batch) -> StepContext:
        step = self._ops.begin_step(batch)
        self._deltas = ()
        return step

    def _batch(self, runs: Seq[_Run]) -> Batch:
        """The batch of the head's own step, single tokens first."""
        slots = np.array([run.slot for run in runs], dtype=np.int64)
        counts = np.array([len(run.token_ids) for run in runs], dtype=np.int64)
        starts = np.array([run.start for run in runs], dtype=np.int64)
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        row_of_token = np.repeat(np.arange(len(runs)), counts)
        positions = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token] + starts[row_of_token]
        block_ids = self._tables[:, slots[row_of_token], positions // self._block_size]
        return Batch(
            rows=tuple(PlanRow(run.slot, run.start, len(run.token_ids)) for run in runs),
            slots=slots,
            token_ids=np.array([token_id for run in runs for token_id in run.token_ids], dtype=np.int64),
            is_fed=None,
            positions=positions,
            slot_mapping=block_ids * self._block_size + positions % self._block_size,
            query_start_loc=query_start_loc,
            seq_lens=starts + counts,
            max_blocks=int(-(-(starts + counts).max() // self._block_size)),
            slot_tables=self._tables,
            table_deltas=self._deltas,
            num_decode_rows=int((counts == 1).sum()),
            sampling_rows=np.arange(len(runs)),
            max_query_len=int(counts.max()),
        )
