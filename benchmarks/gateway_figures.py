"""What a gateway adds to a token, from times with it and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kvrelay.launcher.bench.summary import percentile


def added(name: str, direct: Sequence[float], through: Sequence[float]) -> dict[str, float]:
    """The figures of the kind of token called ``name``, of one repeat: from its times, s, without a gateway and with it. Pure."""
    without_ms = statistics.median(direct) * 1e3
    ordered = sorted(value * 1e3 - without_ms for value in through)
    figures = {f"{name} {q} ms": percentile(ordered, share) for q, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {**figures, f"{name} direct ms": without_ms}
