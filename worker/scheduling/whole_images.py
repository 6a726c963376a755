"""Where chunks of prompts may end, if the tokens of an image see each other. Pure functions.

Of some models, one step must compute all tokens of an image. So no chunk ends inside an image: it ends before the image, or takes
it whole even if the step gets larger than it should.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.common.images import ImageSpan


def last_end(spans: Seq[ImageSpan], start: int, end: int, num_tokens: int, unit: int = 1) -> int:
    """The last position up to ``end`` where a chunk from ``start`` on may end; ``start`` if there is none behind it.

    It may end outside of ``spans``, at a multiple of ``unit`` or with the sequence's last token. ``num_tokens``: of the sequence.
    """
    while end > start:
        inside = next((span for span in spans if span.start < end < span.stop), None)
        if inside is not None:
            end = inside.start
        elif end % unit and end != num_tokens:
            end -= end % unit
        else:
            return end
    return start


def first_end(spans: Seq[ImageSpan], start: int, num_tokens: int, unit: int = 1) -> int:
    """The first position behind ``start`` where a chunk may end; see ``last_end``."""
    end = start + 1
    while True:
        end = min(num_tokens, -(-end // unit) * unit)
        inside = next((span for span in spans if span.start < end < span.stop), None)
        if inside is None:
            return end
        end = inside.stop


def longest_chunk(spans: Seq[ImageSpan], num_tokens: int, unit: int = 1) -> int:
    """The most tokens that a step must compute together because of ``spans``; see ``last_end``."""
    longest = 0
    for span in spans:
        start = last_end(spans, 0, span.start, num_tokens, unit)
        longest = max(longest, first_end(spans, start, num_tokens, unit) - start)
    return longest


def num_together(spans: Seq[ImageSpan], start: int, num_tokens: int, unit: int = 1) -> int:
    """Tokens from ``start`` on that a step must compute together because of an image; 0 if it need not. See ``last_end``."""
    if not spans:
        return 0
    end = first_end(spans, start, num_tokens, unit)
    return end - start if end > first_end((), start, num_tokens, unit) else 0


def chunk(spans: Seq[ImageSpan], start: int, share: int, num_tokens: int, room: int | None, unit: int = 1) -> int:
    """How many of ``share`` tokens from ``start`` on to compute, or more to take an image whole. 0: it must wait.

    ``room``: the most tokens for such an image; None: any number. The others: see ``last_end``.
    """
    end = last_end(spans, start, start + share, num_tokens, unit)
    if end > start:
        return end - start
    most = num_together(spans, start, num_tokens, unit)
    return most if room is None or most <= room else 0
