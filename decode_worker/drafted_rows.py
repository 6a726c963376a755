"""Drafts for the rows of a step: as long as its sequences, the batch and the free blocks allow. Model thread only."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.decode_worker.batch_blocks import BatchBlocks
from kvrelay.decode_worker.drafts import Drafts, Room
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import SequenceStatus


def give_drafts(rows: list[StepRow], drafts: Drafts, held: BatchBlocks, max_model_len: int, room: Room) -> None:
    """Replace ``rows``, of a token each, by rows with drafts where there are any. Allocates blocks, and preempts no sequence."""
    num_more = held.num_left_over_tokens
    limits = {
        row.sequence: min(max_model_len - row.sequence.num_tokens - 1, held.num_left(row.sequence) + num_more)
        for row in rows
        if row.samples
    }
    found = drafts.draft(limits, room)
    for place, row in enumerate(rows):
        sequence = row.sequence
        if draft := found.get(sequence, ()):
            # The drafts before it took blocks, too.
            most = held.num_left(sequence) + held.num_left_over_tokens
            held.extend(sequence, sequence.num_tokens + min(len(draft), most))
        if draft := draft[: held.num_left(sequence)]:
            rows[place] = StepRow(sequence, 1, draft=draft)


def may_draft_behind(flying: Seq[StepRow], drafts: Drafts, max_num_seqs: int) -> bool:
    """Whether the step after ``flying`` must wait, because it may get drafts or the number of pending tokens is not known."""
    if any(row.draft for row in flying):
        return True
    # A sequence that finished with the previous step is still in the running one, and its drafts are forgotten.
    going_on = (row.sequence for row in flying if row.sequence.status is not SequenceStatus.FINISHED)
    return drafts.may_draft(going_on, Room(len(flying), max_num_seqs - len(flying), None))
