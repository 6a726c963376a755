"""Assigns a conversation to one of several models by a hash.

So all gateways agree, and the conversation stays where its KV is cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_NUM_BYTES = 8


def share_of(conversation: str, alias: str, weights: Sequence[float]) -> int:
    """The index of a conversation's weight. Conversations are points on a line, and the weights are the line's sections, in order.

    When a weight grows at the cost of its neighbour, only the conversations between the old and the new border change sides.
    ``alias``: makes the splits of two aliases independent. At least one of ``weights`` is above 0.
    """
    digest = hashlib.blake2b(
        f"{alias}\0{conversation}".encode("utf-8", "surrogatepass"), digest_size=_NUM_BYTES
    ).digest()
    point = int.from_bytes(digest, "big") / 2 ** (8 * _NUM_BYTES) * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    # Rounding can put a point past the last section: it belongs to the last weight above 0.
    return max(index for index, weight in enumerate(weights) if weight > 0)
