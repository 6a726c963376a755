"""Which of several models a conversation belongs to. By a hash: all gateways say the same, and it stays where its KV is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_NUM_BYTES = 8


def share_of(conversation: str, alias: str, weights: Sequence[float]) -> int:
    """The index of a weight. Conversations fall on a line, weights are its sections, in order.

    When a weight grows at the cost of its neighbour, only the conversations between the old border and the new one change sides.
    ``alias``: two splits are independent of each other. At least one of ``weights`` is above 0.
    """
    digest = hashlib.blake2b(
        f"{alias}\0{conversation}".encode("utf-8", "surrogatepass"), digest_size=_NUM_BYTES
    ).digest()
    point = int.from_bytes(digest, "big") / 2 ** (8 * _NUM_BYTES) * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    # The line's end, by rounding: of those that have a part the last one.
    return max(index for index, weight in enumerate(weights) if weight > 0)
