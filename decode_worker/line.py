"""Which waiting sequences join the next step, and how many tokens prompts get. Pure policies, without blocks or costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.overtaking import overtaking


@dataclass(frozen=True, slots=True)
class Line:
    """The waiting sequences that may join the next step."""

    complete: list[Sequence]  # have blocks, K/V and places
    prompt: Sequence | None  # the first one to be computed here, if any place is left …
    has_places: bool  # … and whether there are enough places for it


def shares(num_left: Seq[int], num_tokens: int) -> list[int]:
    """How many tokens of a step each prompt gets. ``num_left``: tokens left of each prompt, the next prompt first."""
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
    """The part of ``idle`` that generates in this step. With several stages, each of their steps takes an equal part.

    The rest is in one of the next steps. So all ``num_generating`` sequences are in as many steps as there are stages. A beam
    search is not split.
    """
    if num_stages == 1:
        return idle
    keys = {one.key for one in idle[: -(-num_generating // num_stages)]}
    return [one for one in idle if one.key in keys]


def look_at(waiting: Seq[Sequence], num_places: int) -> Line:
    """The sequences of ``waiting``, the next one first, that may join a step with ``num_places`` free places.

    A beam search takes several places. Complete sequences join at once. But the first prompt keeps its places from later sequences,
    even while it waits for blocks. Otherwise complete sequences would take every free place, and prompts would wait for ever.
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
