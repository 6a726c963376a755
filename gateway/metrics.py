"""The gateway's metrics. One TTFT, and the parts it is made of, each measured by whoever spent the time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

SEEN_BY_ALL = {
    "kvrelay_workers_up": min,
    "kvrelay_workers_refused": max,
    "kvrelay_worker_requests": max,
    "kvrelay_worker_kv_blocks": max,
}
"""Gauges that every process of a gateway has of the same things: which of its values is the whole's. All others are added up."""


def count_process_deaths(registry: CollectorRegistry) -> Counter:
    """Counted by the parent of several processes, in a registry of its own; 0 in all others."""
    text = "Processes of the gateway (--workers) that ended unasked and were started again"
    return Counter("kvrelay_gateway_process_deaths_total", text, registry=registry)


class GatewayMetrics:
    """Made once per app, on its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        count_process_deaths(registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"kvrelay_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvrelay_{name}_total", text, registry=registry)

        self.requests = Counter(
            "kvrelay_requests_total", "Requests by route and HTTP outcome", ["route", "outcome"], registry=registry
        )
        self.in_flight = Gauge("kvrelay_requests_in_flight", "Requests being served", registry=registry)
        self.prompt_tokens = Counter("kvrelay_gateway_prompt_tokens_total", "Prompt tokens accepted", registry=registry)
        self.output_tokens = Counter("kvrelay_gateway_output_tokens_total", "Tokens generated", registry=registry)
        self.attempts = Counter("kvrelay_attempts_total", "Attempts by how they ended", ["outcome"], registry=registry)
        self.disconnects = Counter("kvrelay_client_disconnects_total", "Clients that left early", registry=registry)
        self.refused_connections = Counter(
            "kvrelay_refused_connections_total",
            "Connections ended for what the client did",
            ["reason"],
            registry=registry,
        )
        self.queued = Gauge(
            "kvrelay_requests_queued", "Requests that wait for a place on the workers", registry=registry
        )
        self.refused = Counter(
            "kvrelay_refused_requests_total", "Requests that got no place, by reason", ["reason"], registry=registry
        )
        self.queued_s = histogram("admission_wait", "How long requests that had to wait did so", _LATENCY)
        self.stop_strings = counter("stop_string_matches", "Generations that a stop string ended")
        self.workers_up = Gauge("kvrelay_workers_up", "Connected workers by role", ["role"], registry=registry)
        self.workers_refused = Gauge(
            "kvrelay_workers_refused", "Connected workers that are not used: other model or KV", registry=registry
        )
        self.worker_requests = Gauge(
            "kvrelay_worker_requests",
            "Requests on the connected workers, as they last reported",
            ["role", "state"],
            registry=registry,
        )
        self.worker_kv_blocks = Gauge(
            "kvrelay_worker_kv_blocks",
            "KV blocks of the connected workers, as they last reported; free ones may be cached",
            ["role", "state"],
            registry=registry,
        )
        self.ttft_s = histogram("time_to_first_token", "Request accepted until its first token", _LATENCY)
        self.itl_s = histogram("inter_token_latency", "Time between two deliveries of tokens of a request", _ITL)
        self.e2e_s = histogram("request_duration", "Request accepted until its last token", _LATENCY)
        self.part_s = histogram(
            "ttft_part", "Parts of a request's start: accept, queue, prefill, transfer, first_step", _LATENCY, "part"
        )
