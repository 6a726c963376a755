"""Which waiting sequences join the next step, and how many tokens prompts get. Pure policies; blocks and costs are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.overtaking import overtaking


@dataclass(frozen=True, slots=True)
class Line:
    """The waiting sequences that may join the next step."""

    complete: list[Sequence]  # hold their blocks and K/V, and find places
    prompt: Sequence | None  # the first that has to be computed, if any places are left for it …
    has_places: bool  # … and whether they are as many as it takes


def shares(num_left: Seq[int], num_tokens: int) -> list[int]:
    """How many tokens each of the prompts with ``num_left`` tokens, the next one first, gets of a step of ``num_tokens``."""
    found = [0] * len(num_left)
    for place, share in overtaking(num_left, num_tokens)[:1]:
        found[place] = share
    rest = num_tokens - sum(found)
    for place, left in enumerate(num_left):
        if not found[place]:
            found[place] = min(left, rest)
            rest -= found[place]
    return found


def share_of_stage(idle: list[Sequence], num_generating: int, num_stages: int) -> list[Sequence]:
    """Who of ``idle``, which may generate, does so in this step: of several stages each has as many as the steps of the others.

    Who is left is in one of the next: none has more, so all of ``num_generating`` have places in as many steps as there are
    stages. A beam search is in one step.
    """
    if num_stages == 1:
        return idle
    keys = {one.key for one in idle[: -(-num_generating // num_stages)]}
    return [one for one in idle if one.key in keys]


def look_at(waiting: Seq[Sequence], num_places: int) -> Line:
    """What ``waiting``, the next one first, has for a step with ``num_places`` free places; a beam search takes several.

    Complete sequences join at once, but the first prompt keeps its places from those behind it, also while it waits for blocks.
    Else sequences that come complete would take each place that comes free, and those that are computed here would wait for ever.
    """
    complete: list[Sequence] = []
    prompt: Sequence | None = None
    has_places = False
    for sequence in waiting:
        if num_places <= 0:
            break
        num_needed, is_complete = sequence.sampling.num_sequences, bool(sequence.block_tables)
        if not is_complete:
            if prompt is not None:
                continue
            prompt, has_places = sequence, num_needed <= num_places
        if num_needed > num_places:
            break
        if is_complete:
            complete.append(sequence)
        num_places -= num_needed
    return Line(complete, prompt, has_places=has_places)
