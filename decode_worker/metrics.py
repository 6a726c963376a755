"""A decode worker's own metrics: how many draft tokens were right, and the time that drafting took."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class DraftMetrics:
    """Drafted and accepted tokens by drafter, and the computing time of a draft model or a head."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafted = Counter(
            "kvrelay_draft_tokens_total", "Tokens drafted by speculation", ["drafter"], registry=registry
        )
        self._accepted = Counter(
            "kvrelay_accepted_draft_tokens_total", "Drafted tokens that were right", ["drafter"], registry=registry
        )
        self._computed_s = Counter(
            "kvrelay_draft_model_seconds_total",
            "Computing time of the draft model or the head between steps, by purpose: drafts, text (reading texts)",
            ["work"],
            registry=registry,
        )
        self.failures = Counter(
            "kvrelay_draft_model_failures_total",
            "Failed steps of the draft model or the head; after three in a row it is not asked any more",
            registry=registry,
        )

    def count(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """Count one draft."""
        self._drafted.labels(drafter).inc(num_drafted)
        self._accepted.labels(drafter).inc(num_accepted)

    def computed(self, work: str, step_s: float) -> None:
        """Add a step of the draft model or the head. ``work``: "drafts" or "text"."""
        self._computed_s.labels(work).inc(step_s)
