"""What a gateway adds to a token, from times with it and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kvrelay.launcher.bench.summary import percentile


def added(
    name: str, direct: Sequence[float], least: Sequence[float] | None, through: Sequence[float]
) -> dict[str, float]:
    """The figures of the kind of token called ``name``, of one repeat. Pure.

    From its times, s: without a gateway, with the least one (None: not to be compared with), with ours.
    """
    without_ms = statistics.median(direct) * 1e3
    ordered = sorted(value * 1e3 - without_ms for value in through)
    figures = {f"{name} {q} ms": percentile(ordered, share) for q, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    figures[f"{name} direct ms"] = without_ms
    if least is not None:
        least_ms = statistics.median(least) * 1e3 - without_ms
        figures |= {f"{name} least p50 ms": least_ms, f"{name} p50 to least": figures[f"{name} p50 ms"] / least_ms}
    return figures
