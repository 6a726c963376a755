"""A decode worker's own metrics: how its drafts went."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class DraftMetrics:
    """Tokens that were drafted, and those of them that came true, by drafter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafted = Counter(
            "kvrelay_draft_tokens_total", "Tokens drafted by speculation", ["drafter"], registry=registry
        )
        self._accepted = Counter(
            "kvrelay_accepted_draft_tokens_total", "Drafted tokens that came true", ["drafter"], registry=registry
        )

    def count(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """One draft."""
        self._drafted.labels(drafter).inc(num_drafted)
        self._accepted.labels(drafter).inc(num_accepted)
