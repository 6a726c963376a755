"""The metrics of several processes as if they were one's. Pure functions of what each process's registry holds.

Counters and histograms are added, those of processes that have ended included: a sum that became smaller would look like a restart
of all, and a rate over it like a burst. Gauges are added, too, over the processes that live, unless adding makes no sense: each
process sees the same workers (:data:`kvrelay.gateway.metrics.SEEN_BY_ALL`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

Choice = Callable[[Iterable[float]], float]  # of one value from those of all processes


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One number."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """What has one name and one ``# TYPE``."""

    name: str
    kind: str  # counter, gauge, histogram
    text: str
    samples: tuple[Sample, ...]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """What a registry holds now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple(Sample(one.name, tuple(one.labels.items()), float(one.value)) for one in metric.samples),
        )
        for metric in registry.collect()
    ]


def added(snapshots: Iterable[Sequence[Family]], choices: Mapping[str, Choice] | None = None) -> list[Family]:
    """All of ``snapshots`` as one; gauges named in ``choices`` are not added but chosen so."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for families_of_one in snapshots:
        for family in families_of_one:
            families.setdefault(family.name, family)
            of_family = values.setdefault(family.name, {})
            for sample in family.samples:
                of_family.setdefault((sample.name, sample.labels), []).append(sample.value)
    return [
        Family(
            family.name,
            family.kind,
            family.text,
            tuple(
                Sample(name, labels, _choice(name, family, choices or {})(numbers))
                for (name, labels), numbers in values[family.name].items()
            ),
        )
        for family in families.values()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """What of a process's metrics counts on when it has ended."""
    return [family for family in families if family.kind != "gauge"]


def exposition(families: Iterable[Family]) -> bytes:
    """In Prometheus' text format, as one process's own."""
    registry = CollectorRegistry()
    registry.register(_Families(list(families)))
    return generate_latest(registry)


def _choice(sample_name: str, family: Family, choices: Mapping[str, Choice]) -> Choice:
    if sample_name.endswith("_created") and family.kind != "gauge":
        return min  # when counting began
    return choices.get(family.name, sum)


class _Families:
    """A collector of what was collected elsewhere."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric
