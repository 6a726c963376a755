"""A prefill worker's metrics of the tier of KV blocks in the host's memory."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrelay.engine.kv.host.tier import HostTier


class HostKvMetrics:
    """What the tier has, and what came of its copies. All are 0 without a tier."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tier: HostTier | None = None
        self._blocks = Counter(
            "kvrelay_host_kv_blocks_total",
            "KV blocks copied between the pool and the host's memory, by event: kept, missed (they left the pool before, "
            "or found no memory), returned, wrong (they came back with other bytes, and were dropped)",
            ["event"],
            registry=registry,
        )
        for event in ("kept", "missed", "returned", "wrong"):
            self._blocks.labels(event)
        self._tokens = Counter(
            "kvrelay_host_kv_tokens_total", "Prompt tokens whose KV came back from the host's memory", registry=registry
        )
        gauges: tuple[tuple[str, str, Callable[[HostTier], float]], ...] = (
            ("used", "KV blocks in the host's memory", lambda tier: tier.num_kept),
            (
                "capacity",
                "KV blocks that fit the host's memory that is set aside for them",
                lambda tier: tier.num_slots,
            ),
            ("queued", "KV blocks that wait to be copied to the host's memory", lambda tier: tier.num_queued),
        )
        for name, text, read in gauges:
            gauge = Gauge(f"kvrelay_host_kv_{name}_blocks", text, registry=registry)
            gauge.set_function(lambda read=read: 0.0 if self.tier is None else read(self.tier))  # type: ignore[misc]

    def count(self, event: str, number: int) -> None:
        """Add to an event of the tier; see HostTier."""
        if event == "tokens":
            self._tokens.inc(number)
        else:
            self._blocks.labels(event).inc(number)
