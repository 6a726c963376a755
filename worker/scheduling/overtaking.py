"""Which prompts overtake a longer one in a step. A pure policy.

Served one behind the other, a prompt of 100 tokens behind one of 32,000 waits for all of them. The first prompt in line that a
step does not finish is in the way of all behind it. Those with at most half as much left may overtake it. They have half of what
it would get among themselves, the shortest first: shortest remaining time first (Schrage 1968) makes the mean wait smallest, but
alone it starves the long. The other half goes on in order, so nobody waits more than twice as long as if no one overtook. Prompts
that are alike do not overtake each other: it would only make the first ones late, too.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import accumulate


def in_the_way(num_left: Seq[int], num_tokens: int) -> int | None:
    """Which of the prompts with ``num_left`` tokens, the next one first, a step of ``num_tokens`` is the first not to finish."""
    return next((place for place, end in enumerate(accumulate(num_left)) if end > num_tokens), None)


def overtaking(
    num_left: Seq[int], num_tokens: int, allowed: Collection[int] | None = None, unit: int = 1
) -> list[tuple[int, int]]:
    """Who overtakes the prompt in the way, by place, with its tokens of the step, the shortest first. ``allowed``: None: all.

    Whoever does not finish gets whole ``unit``s of tokens.
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
