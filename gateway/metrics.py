"""The gateway's metrics. One TTFT, and the parts it is made of, each measured by whoever spent the time."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvrelay.common.clock import Clock
from kvrelay.common.logs import RareWarnings

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class TokenMeter:
    """Counts tokens and the times between them: all that every token moves, and every prompt before it is sent on.

    Prometheus' own metrics take a lock per number, and several microseconds per token; here the numbers are plain, and become
    metrics when they are read. On one thread.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_gaps = [0] * (len(_ITL) + 1)  # by bucket, the last one without a bound
        self._sum_s = 0.0
        registry.register(self)

    def on_prompt(self, num_tokens: int) -> None:
        """A prompt of so many tokens is accepted."""
        self._num_prompt_tokens += num_tokens

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """So many tokens of a request are delivered, ``gap_s`` after those before; None for its first."""
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._num_gaps[bisect_left(_ITL, gap_s)] += 1
            self._sum_s += gap_s

    def on_cached(self, num_tokens: int) -> None:
        """So many tokens of an accepted prompt need no computing."""
        self._num_cached_tokens += num_tokens

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of prompts, of output, and of prompts that were cached, so far."""
        return self._num_prompt_tokens, self._num_tokens, self._num_cached_tokens

    def collect(self) -> Iterator[Metric]:
        """The metrics. Called by the registry."""
        yield CounterMetricFamily(
            "kvrelay_gateway_prompt_tokens", "Prompt tokens accepted", value=self._num_prompt_tokens
        )
        yield CounterMetricFamily(
            "kvrelay_gateway_cached_prompt_tokens",
            "Prompt tokens that workers had in their caches",
            value=self._num_cached_tokens,
        )
        yield CounterMetricFamily("kvrelay_gateway_output_tokens", "Tokens generated", value=self._num_tokens)
        bounds = [*map(str, _ITL), "+Inf"]
        yield HistogramMetricFamily(
            "kvrelay_inter_token_latency_seconds",
            "Time between two deliveries of tokens of a request",
            buckets=list(zip(bounds, accumulate(map(float, self._num_gaps)), strict=True)),
            sum_value=self._sum_s,
        )


class GatewayMetrics:
    """Made once per app, on its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"kvrelay_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self.requests = Counter(
            "kvrelay_requests_total",
            "Requests by route and outcome: the HTTP status, client_left, or failed_mid_stream and client_behind of streams",
            ["route", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge("kvrelay_requests_in_flight", "Requests being served", registry=registry)
        self.tokens = TokenMeter(registry)
        self.attempts = Counter(
            "kvrelay_attempts_total",
            "Attempts by how they ended: finished, stopped (a stop string), given_up, moved, taken_back, or why they failed",
            ["outcome"],
            registry=registry,
        )
        self.prompt_ways = Counter(
            "kvrelay_prompt_ways_total",
            "Attempts by the way of their prompts, hand_off or local (computed by a decode worker), and why",
            ["way", "reason"],
            registry=registry,
        )
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
        self.breakers_open = Gauge(
            "kvrelay_circuit_breakers_open",
            "Workers, and pairs of a prefill and a decode worker, that failed several requests and are only sent probes",
            ["of"],
            registry=registry,
        )
        self.ttft_s = histogram("time_to_first_token", "Request accepted until its first token", _LATENCY)
        self.e2e_s = histogram("request_duration", "Request accepted until its last token", _LATENCY)
        self.part_s = histogram(
            "ttft_part", "Parts of a request's start: accept, queue, prefill, transfer, first_step", _LATENCY, "part"
        )


logger = logging.getLogger(__name__)


class Reason(StrEnum):
    """The label ``reason`` of ``kvrelay_refused_connections_total``."""

    TOO_MANY_CONNECTIONS = "too_many_connections"
    INVALID_HTTP = "invalid_http"
    HEADERS_TOO_LARGE = "headers_too_large"
    HEADER_TIMEOUT = "header_timeout"
    BODY_TIMEOUT = "body_timeout"
    PIPELINE = "pipeline"
    CLIENT_READS_NOTHING = "client_reads_nothing"


class Refusals:
    """Counts refusals and logs them, one line a second at the most: a flood of them must not become a flood of logs."""

    def __init__(self, counter: Counter, clock: Clock) -> None:
        """``counter`` has one label, the reason."""
        self._counter = counter
        self._warnings = RareWarnings(logger, clock)
        for reason in Reason:
            counter.labels(reason)  # a series that begins at 0 is one that alerts can take the increase of

    def count(self, reason: Reason, detail: str, client: object) -> None:
        """One more; ``detail`` and the ``client``'s address are for the log."""
        self._counter.labels(reason).inc()
        self._warnings.warn(f"ended the connection of {client}: {detail}", str(reason))
