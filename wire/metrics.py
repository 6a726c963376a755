"""Counters of the wire. A test increments each of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class WireMetrics:
    """Made once per process on its registry and handed to everything that sends or receives."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvrelay_{name}_total", text, labels, registry=registry)

        self.refused_messages = counter(
            "refused_messages", "Control frames dropped: malformed, oversize, or before Hello", "cause"
        )
        self.refused_hellos = counter("refused_hellos", "Peers whose Hello was refused", "code")
        self.refused_keys = counter("refused_keys", "Connections refused because of their key")
        self.refused_tokens = counter("refused_tokens", "Data connections refused for a wrong token")
        self.lost_peers = counter("lost_peers", "Peers that fell silent, disconnected or restarted")
        self.data_lines = counter("kv_data_lines", "Connections opened to send KV blocks, by path", "path")
        self.blocks_sent = counter(
            "kv_blocks_sent", "KV blocks handed to the network or to shared memory, by path", "path"
        )
        self.bytes_sent = counter(
            "kv_bytes_sent", "KV bytes handed to the network or to shared memory, by path", "path"
        )
        self.refused_greetings = counter("refused_shared_memory", "Offers of shared memory that were refused", "cause")
        self.blocks_received = counter("kv_blocks_received", "KV blocks received and verified")
        self.bytes_received = counter("kv_bytes_received", "KV bytes received and verified")
        self.refused_blocks = counter(
            "refused_kv_blocks",
            "KV blocks that were dropped, by cause: failed verification, or late (unknown_lease, duplicate, stale_epoch)",
            "cause",
        )
        self.reused_blocks = counter("kv_blocks_reused", "KV blocks that were not sent because the receiver had them")
        self.handoffs = counter("handoffs", "Hand-offs that ended on this side, by outcome", "outcome")
        self.transfer_s = Histogram(
            "kvrelay_transfer_wait_seconds",
            "Time from the commit until every block was verified",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
            registry=registry,
        )
