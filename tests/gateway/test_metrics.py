"""Metrics that the gateway counts without prometheus_client's own types."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from kvrelay.gateway.metrics import TokenMeters

GAPS_S = (0.0, 0.001, 0.00100001, 0.02, 0.025, 4.999, 5.0, 5.1, 600.0)
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def test_the_meter_tells_what_prometheus_own_histogram_would() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    meter = TokenMeters(registry).of("tiny")
    text = "Time between two deliveries of tokens of a request"
    theirs = Histogram("kvrelay_inter_token_latency_seconds", text, ["model"], buckets=BUCKETS, registry=other).labels(
        "tiny"
    )
    meter.on_tokens(3, None)  # the first tokens of a request have no gap
    for gap_s in GAPS_S:
        meter.on_tokens(2, gap_s)
        theirs.observe(gap_s)
    ours = generate_latest(registry).decode().splitlines()
    expected = [line for line in generate_latest(other).decode().splitlines() if "_created" not in line]
    assert [line for line in ours if "inter_token" in line] == expected
    assert 'kvrelay_gateway_output_tokens_total{model="tiny"} 21.0' in ours
