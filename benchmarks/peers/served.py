"""Time to first token as the server itself counted it, whoever asked.

What a client saw beyond that is the client's own, and the network's.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_SUFFIX = "time_to_first_token_seconds"  # kvrelay's gateway and vLLM have one, each behind a prefix of its own


@dataclass(frozen=True, slots=True)
class ServedTtft:
    """So far."""

    sum_s: float
    count: int

    def mean_since(self, before: ServedTtft) -> float | None:
        """Seconds; None if nothing was served since."""
        count = self.count - before.count
        return (self.sum_s - before.sum_s) / count if count else None


def read_served_ttft(url: str) -> ServedTtft | None:
    """None if the server at ``url`` does not tell."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/metrics", timeout=10.0) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    return served_ttft(text)


def served_ttft(metrics: str) -> ServedTtft | None:
    """Of ``/metrics``, over all labels; None if there is no such histogram. Pure."""
    for family in text_string_to_metric_families(metrics):
        if family.name.endswith(_SUFFIX):
            totals = {"_sum": 0.0, "_count": 0.0}
            for sample in family.samples:
                part = sample.name.removeprefix(family.name)
                if part in totals:
                    totals[part] += sample.value
            return ServedTtft(totals["_sum"], round(totals["_count"]))
    return None
