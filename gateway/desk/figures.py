"""Rates and latencies of the last seconds, computed from counters and histograms that only grow.

Pure except for reading the metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.registry import Collector

from kvrelay.gateway.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class Tallied:
    """A histogram's values at one moment."""

    bounds: Sequence[float]  # seconds, the last one infinite
    counts: Sequence[float]  # number of values up to each bound
    sum_s: float

    def since(self, before: Tallied) -> Tallied:
        """The values that were added after ``before``."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Tallied(self.bounds, counts, self.sum_s - before.sum_s)

    @property
    def num(self) -> float:
        """The number of values."""
        return self.counts[-1]

    def mean_s(self) -> float:
        """The mean; 0 without values."""
        return self.sum_s / self.num if self.num else 0.0

    def quantile_s(self, share: float) -> float | None:
        """The quantile ``share``, interpolated linearly between two bounds. None without values."""
        if not self.num:
            return None
        below, lower_s = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= share * self.num:
                # Above the last finite bound nothing is known.
                return (
                    lower_s
                    if bound == float("inf")
                    else lower_s + (bound - lower_s) * _part(share * self.num, below, count)
                )
            below, lower_s = count, bound
        raise AssertionError(f"a histogram's last bucket has {self.counts[-1]}, and not all")


@dataclass(frozen=True, slots=True)
class Tally:
    """All counts at one moment."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    ttft: Tallied
    itl: Tallied
    parts: Mapping[str, Tallied]

    @classmethod
    def of(cls, metrics: GatewayMetrics, now_s: float) -> Tally:
        """Read the metrics."""
        [ttft] = _tallied(metrics.ttft_s).values()
        [itl] = _tallied(metrics.tokens).values()
        return cls(now_s, *metrics.tokens.counts, ttft, itl, _tallied(metrics.part_s))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The time between two tallies. Latencies are in seconds; null means unknown."""

    prompt_tokens_per_s: int
    output_tokens_per_s: int
    cached: float | None  # the share of prompt tokens that workers had in their caches
    ttft_s: tuple[float | None, float | None]  # median and 95th percentile
    itl_s: tuple[float | None, float | None]  # median and 99th percentile
    parts_s: dict[str, float]  # the means of the parts that were measured

    @classmethod
    def between(cls, before: Tally, now: Tally) -> Figures:
        """The figures between two tallies. ``before`` is older than ``now``, or the same."""
        passed_s = max(now.at_s - before.at_s, 1e-9)
        num_prompt = now.num_prompt_tokens - before.num_prompt_tokens
        ttft, itl = now.ttft.since(before.ttft), now.itl.since(before.itl)
        parts = {
            name: one.since(before.parts[name]) if name in before.parts else one for name, one in now.parts.items()
        }
        return cls(
            prompt_tokens_per_s=round(num_prompt / passed_s),
            output_tokens_per_s=round((now.num_output_tokens - before.num_output_tokens) / passed_s),
            cached=round((now.num_cached_tokens - before.num_cached_tokens) / num_prompt, 3) if num_prompt else None,
            ttft_s=(_short(ttft.quantile_s(0.5)), _short(ttft.quantile_s(0.95))),
            itl_s=(_short(itl.quantile_s(0.5)), _short(itl.quantile_s(0.99))),
            parts_s={name: round(one.mean_s(), 5) for name, one in parts.items() if one.num},
        )


def _part(target: float, below: float, count: float) -> float:
    return (target - below) / (count - below) if count > below else 1.0


def _short(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 5)


def _tallied(collector: Collector) -> dict[str, Tallied]:
    """A collector's histograms by the label ``part`` (empty if it has none), summed over all models."""
    counts: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))  # by part and bound
    sums: dict[str, float] = defaultdict(float)
    for sample in (sample for family in collector.collect() for sample in family.samples):
        part = sample.labels.get("part", "")
        if sample.name.endswith("_bucket"):
            counts[part][float(sample.labels["le"])] += sample.value
        elif sample.name.endswith("_sum"):
            sums[part] += sample.value
    return {part: Tallied(list(counts[part]), list(counts[part].values()), sum_s) for part, sum_s in sums.items()}
