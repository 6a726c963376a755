"""How long the KV of a request should stay as prefix cache: the retention hints of a request.

The two values are those of TensorRT-LLM's KV cache retention config: a priority from 0 to 100, with 35 for who says nothing,
and a time for which a raised one holds. They are hints: blocks that somebody needs are taken whatever their priority, the
lowest first (see :mod:`kvrelay.engine.kv.prefix_cache`).
"""

from __future__ import annotations

import math

import msgspec

MIN_PRIORITY = 0
MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35


class Retention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one request asks for its blocks, those of prompt and output.

    A priority below the default means "evict first", as for a prompt that will not come again; ``ttl_s`` says nothing then.
    """

    priority: int = DEFAULT_PRIORITY  # 0 to 100; the higher, the longer it stays
    ttl_s: float | None = None  # how long a raised priority holds once the request is over; None: while the blocks stay

    def problem(self) -> str | None:
        """What is wrong with the values, naming value and limit; None if nothing is."""
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            return f"retention.priority is {self.priority}; it must be {MIN_PRIORITY} to {MAX_PRIORITY}"
        if self.ttl_s is not None and not 0 < self.ttl_s < math.inf:  # not a number: neither
            return f"retention.ttl_s is {self.ttl_s}; it must be above 0 and finite"
        return None
