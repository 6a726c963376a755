"""Who of those that wait finds places in the next step, and which prompt goes first. Pure policies, without blocks and costs.

Prompts are served in order of arrival, which alone would let one of 100 tokens wait for one of 7,000. So the shortest that has at
most half as much left as the first one that the step does not finish gets half of what that would have. The other half goes on in
order: nobody takes more than twice as long as if no one overtook. Prompts that are alike do not overtake each other: it
would only make the first ones late, too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Line:
    """What the line has for the next step."""

    complete: list[Sequence]  # hold their blocks and K/V, and find places
    prompt: Sequence | None  # the oldest that has to be computed, if any places are left for it …
    has_places: bool  # … and whether they are as many as it takes


def overtaking(num_left: Seq[int], num_tokens: int) -> tuple[int, int] | None:
    """Which of the prompts with ``num_left`` tokens, the oldest first, overtakes in a step of ``num_tokens``, and its share.

    None: they are served in order.
    """
    first = next((place for place, end in enumerate(accumulate(num_left)) if end > num_tokens), None)
    if first is None:
        return None
    rest = num_tokens - sum(num_left[:first])
    shortest = min(range(first, len(num_left)), key=lambda place: num_left[place])
    share = min(num_left[shortest], rest // 2)
    return (shortest, share) if share > 0 and 2 * num_left[shortest] <= num_left[first] else None


def shares(num_left: Seq[int], num_tokens: int) -> list[int]:
    """How many tokens each of the prompts with ``num_left`` tokens, the oldest first, gets of a step of ``num_tokens``."""
    found = [0] * len(num_left)
    if (turn := overtaking(num_left, num_tokens)) is not None:
        found[turn[0]] = turn[1]
    rest = num_tokens - sum(found)
    for place, left in enumerate(num_left):
        if not found[place]:
            found[place] = min(left, rest)
            rest -= found[place]
    return found


def look_at(waiting: Seq[Sequence], num_places: int) -> Line:
    """What ``waiting``, the oldest first, has for a step with ``num_places`` free places; a beam search takes several.

    Complete sequences join at once, but the oldest prompt keeps its places from younger ones, also while it waits for blocks. Else
    sequences that come complete would take each place that comes free, and those that are computed here would wait for ever.
    """
    complete: list[Sequence] = []
    prompt: Sequence | None = None
    has_places = False
    for sequence in waiting:
        if num_places <= 0:
            break
        num_needed, is_complete = sequence.sampling.num_sequences, bool(sequence.block_table)
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
