"""Who of those that wait finds places in the next step. A pure policy; whether a prompt finds blocks, too, is not its business."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Line:
    """What the line has for the next step."""

    complete: list[Sequence]  # hold their blocks and K/V, and find places
    prompt: Sequence | None  # who is next behind those, if that one has to be computed and any places are left …
    has_places: bool  # … and whether they are as many as it takes


def look_at(waiting: Seq[Sequence], num_places: int) -> Line:
    """What ``waiting``, the oldest first, has for a step with ``num_places`` free places; a beam search takes several."""
    complete: list[Sequence] = []
    num_left = num_places
    for sequence in waiting:
        num_needed = sequence.sampling.num_sequences
        if num_left < num_needed:
            break
        if sequence.block_table:
            complete.append(sequence)
            num_left -= num_needed
        elif sequence.sampling.beam_search is not None:
            # Places that come free one by one would never be enough for it, if younger ones took each.
            num_left -= num_needed
    num_left = num_places - sum(sequence.sampling.num_sequences for sequence in complete)
    joins = set(complete)
    head = next((sequence for sequence in waiting if sequence not in joins), None)
    if head is None or head.block_table or num_left <= 0:
        return Line(complete, None, has_places=False)
    return Line(complete, head, has_places=num_left >= head.sampling.num_sequences)
