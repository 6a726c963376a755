"""What one API key may ask for: requests a second, requests at a time, how early in line, and whether it is an operator's.

Pure state; the caller brings the time.
Requests a second are counted by a token bucket: ``burst`` requests may come at once, and the bucket fills at ``requests_per_s``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.gateway.errors import TooManyRequestsError

OPTIONS = ("requests_per_s", "burst", "concurrency", "min_priority", "operator")
_BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of one key; without any, it may ask as often as it likes, and waits in line like everybody."""

    requests_per_s: float = math.inf
    burst: float = math.inf  # requests that may come at once
    concurrency: float = math.inf
    min_priority: int = 0  # a request that asks for a smaller one, to be served earlier, gets this one
    operator: bool = False  # whether it may look at workers and at everybody's requests

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KeyLimits:
        """From texts by name. Raises ValueError naming what is wrong; never quotes a value."""
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in OPTIONS:
                raise ValueError(f"an unknown option; known are {', '.join(OPTIONS)}")
            try:
                value = float(text) if name == "requests_per_s" else int(text)
            except ValueError:
                raise ValueError(f"{name} is not a number") from None
            if name != "min_priority" and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0")
            values[name] = value if name != "operator" else True
        if "burst" in values and "requests_per_s" not in values:
            raise ValueError("burst means nothing without requests_per_s")
        if "requests_per_s" in values:
            values.setdefault("burst", max(1.0, math.ceil(values["requests_per_s"])))
        return cls(**values)


class KeyUse:
    """How much of its limits one key uses now."""

    def __init__(self) -> None:
        self._num_running = 0
        self._filling = math.inf  # of the bucket, which starts full
        self._filled_s = 0.0  # when it was so full
        self.min_priority = 0  # of the limits that the last request entered by
        self.is_operator = False  # the same

    def enter(self, limits: KeyLimits, now_s: float) -> None:
        """A request begins; ``leave`` must follow. Raises TooManyRequestsError if it may not."""
        self.min_priority, self.is_operator = limits.min_priority, limits.operator
        if self._num_running >= limits.concurrency:
            raise TooManyRequestsError(
                f"this API key has {self._num_running} requests running, which is its limit",
                retry_after_s=_BUSY_RETRY_S,
            )
        if not math.isinf(limits.requests_per_s):
            filled = self._filling + (now_s - self._filled_s) * limits.requests_per_s
            self._filling, self._filled_s = min(limits.burst, filled), now_s
            if self._filling < 1:
                raise TooManyRequestsError(
                    f"this API key may ask {limits.requests_per_s:g} times a second, {limits.burst:g} at once",
                    retry_after_s=(1 - self._filling) / limits.requests_per_s,
                )
            self._filling -= 1
        self._num_running += 1

    def leave(self) -> None:
        """A request is over."""
        self._num_running -= 1
