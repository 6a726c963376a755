"""Which prompts overtake a longer one in a step. A pure policy.

In strict order, a prompt of 100 tokens behind one of 32,000 waits for all of them. The first prompt in line that a step does not
finish blocks all prompts after it. Prompts with at most half as many tokens left may overtake it. They share half of its tokens in
the step, the shortest first: shortest remaining time first (Schrage 1968) makes the mean wait smallest, but alone it starves long
prompts. The other half is used in order, so no prompt waits more than twice as long as without overtaking. Similar prompts do not
overtake each other, because that would only delay the first ones too.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import accumulate


def in_the_way(num_left: Seq[int], num_tokens: int) -> int | None:
    """Index of the first prompt that a step of ``num_tokens`` does not finish; None if it finishes all. ``num_left``: of each."""
    return next((place for place, end in enumerate(accumulate(num_left)) if end > num_tokens), None)


def overtaking(
    num_left: Seq[int], num_tokens: int, allowed: Collection[int] | None = None, unit: int = 1
) -> list[tuple[int, int]]:
    """The prompts that overtake the blocking one, as (index, tokens in the step), the shortest first.

    ``allowed``: indices that may overtake; None: all. A prompt that the step does not finish gets a multiple of ``unit`` tokens.
    """
    first = in_the_way(num_left, num_tokens)
    if first is None:
        return []
    free = (num_tokens - sum(num_left[:first])) // 2
    shorter = [place for place in range(first + 1, len(num_left)) if 2 * num_left[place] <= num_left[first]]
    found: list[tuple[int, int]] = []
    for place in sorted(shorter, key=lambda place: num_left[place]):
        if allowed is not None and place not in allowed:
            continue
        share = num_left[place] if num_left[place] <= free else free - free % unit
        if share == 0:
            break
        found.append((place, share))
        free -= share
    return found
