"""The gateway's metrics. There is one TTFT and its parts; the process that spends the time of a part measures it.

Metrics of one model have the label ``model``. Code that works for one model gets :class:`ModelMetrics`, which fills the label in.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvrelay.common.clock import Clock
from kvrelay.common.listening import host_port
from kvrelay.common.logs import RareWarnings
from kvrelay.wire.metrics import WireMetrics

M = TypeVar("M", Counter, Gauge, Histogram)

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class TokenMeter:
    """Counts one model's tokens and the times between them: everything that changes with every token or every prompt.

    Prometheus' own metrics take a lock per number and several microseconds per token. Here the numbers are plain and become metrics
    when they are read. Use it on one thread.
    """

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_gaps = [0] * (len(_ITL) + 1)  # by bucket; the last one has no upper bound
        self._sum_s = 0.0

    def on_prompt(self, num_tokens: int) -> None:
        """Count an accepted prompt of ``num_tokens``."""
        self._num_prompt_tokens += num_tokens

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Count ``num_tokens`` delivered tokens of a request, ``gap_s`` after those before. None: the request's first tokens."""
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._num_gaps[bisect_left(_ITL, gap_s)] += 1
            self._sum_s += gap_s

    def on_cached(self, num_tokens: int) -> None:
        """Count ``num_tokens`` of an accepted prompt that need no computing."""
        self._num_cached_tokens += num_tokens

    @property
    def counts(self) -> tuple[int, int, int]:
        """The tokens of prompts, of output, and of cached prompts so far."""
        return self._num_prompt_tokens, self._num_tokens, self._num_cached_tokens

    @property
    def gaps(self) -> tuple[list[float], float]:
        """The number of gaps up to each bound (the last bound is infinite), and the sum of all gaps in seconds."""
        return list(accumulate(map(float, self._num_gaps))), self._sum_s


class TokenMeters:
    """The token meters of all models, as metrics. Implements prometheus_client's Collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._meters: dict[str, TokenMeter] = {}
        registry.register(self)

    def of(self, model: str) -> TokenMeter:
        """A model's meter, made at the first call."""
        return self._meters.setdefault(model, TokenMeter())

    @property
    def counts(self) -> tuple[int, int, int]:
        """The tokens of prompts, of output, and of cached prompts so far, summed over all models."""
        counts = [one.counts for one in self._meters.values()]
        prompt, output, cached = (sum(part) for part in zip((0, 0, 0), *counts, strict=True))
        return prompt, output, cached

    def collect(self) -> Iterator[Metric]:
        """The metrics. The registry calls this."""
        names = (
            ("kvrelay_gateway_prompt_tokens", "Prompt tokens accepted"),
            ("kvrelay_gateway_output_tokens", "Tokens generated"),
            ("kvrelay_gateway_cached_prompt_tokens", "Prompt tokens found in workers' prefix caches"),
        )
        for index, (name, text) in enumerate(names):
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, meter in self._meters.items():
                counter.add_metric([model], meter.counts[index])
            yield counter
        bounds = [*map(str, _ITL), "+Inf"]
        histogram = HistogramMetricFamily(
            "kvrelay_inter_token_latency_seconds",
            "Time between two deliveries of tokens of a request",
            labels=["model"],
        )
        for model, meter in self._meters.items():
            counts, sum_s = meter.gaps
            histogram.add_metric([model], buckets=list(zip(bounds, counts, strict=True)), sum_value=sum_s)
        yield histogram


class GatewayMetrics:
    """All metrics of a gateway. Made once per app, on its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.wire = WireMetrics(registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"kvrelay_{name}_seconds", text, ["model", *labels], buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvrelay_{name}_total", text, ["model", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvrelay_{name}", text, ["model", *labels], registry=registry)

        self.in_flight = Gauge(
            "kvrelay_requests_in_flight",
            "HTTP requests being served, this one for metrics among them",
            registry=registry,
        )
        self.key_tokens = Counter(
            "kvrelay_api_key_tokens_total",
            "Tokens that requests cost, by API key, model and kind: prompt, completion, cached (prompt tokens found in a cache)",
            ["key", "model", "kind"],
            registry=registry,
        )
        self.disconnects = Counter("kvrelay_client_disconnects_total", "Clients that left early", registry=registry)
        self.refused_connections = Counter(
            "kvrelay_refused_connections_total",
            "Connections that the gateway closed because of what the client did, by reason",
            ["reason"],
            registry=registry,
        )
        self.image_fetch_s = Histogram(
            "kvrelay_image_fetch_seconds",
            "Time of fetching one image that a request names by URL, by outcome: fetched, refused (for what the host answered), "
            "host_failed, late, given_up",
            ["outcome"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.requests = counter(
            "requests",
            "Requests by model (if one was found), route and outcome: the HTTP status, client_left, or failed_mid_stream and "
            "client_behind of streams",
            "route",
            "outcome",
        )
        self.tokens = TokenMeters(registry)
        self.attempts = counter(
            "attempts",
            "Attempts by how they ended: finished, stopped (a stop string), given_up, moved, taken_back, or why they failed",
            "outcome",
        )
        self.prompt_ways = counter(
            "prompt_ways",
            "Attempts by the way of their prompts (hand_off, or local: computed by a decode worker), and the reason",
            "way",
            "reason",
        )
        self.queued = gauge("requests_queued", "Requests in the gateway's line")
        self.refused = counter("refused_requests", "Requests refused because workers had no place, by reason", "reason")
        self.queued_s = histogram("admission_wait", "Time that waiting requests spent in the gateway's line", _LATENCY)
        self.workers_up = gauge("workers_up", "Connected workers by role", "role")
        self.distrusted_workers = counter(
            "distrusted_workers", "Workers that reported that they compute wrongly, by role", "role"
        )
        self.workers_refused = gauge("workers_refused", "Connected workers that are not used: other model or KV")
        self.worker_requests = gauge(
            "worker_requests", "Requests on the connected workers, as they last reported", "role", "state"
        )
        self.worker_kv_blocks = gauge(
            "worker_kv_blocks",
            "KV blocks of the connected workers, as they last reported; free ones may be cached",
            "role",
            "state",
        )
        self.breakers_open = gauge(
            "circuit_breakers_open",
            "Workers, and pairs of workers, that failed several requests and now get only probes",
            "of",
        )
        self.ttft_s = histogram("time_to_first_token", "Time from accepting a request until its first token", _LATENCY)
        self.e2e_s = histogram("request_duration", "Time from accepting a request until its last token", _LATENCY)
        self.part_s = histogram(
            "ttft_part", "Parts of a request's start: accept, queue, prefill, transfer, first_step", _LATENCY, "part"
        )

    def of_model(self, model: str) -> ModelMetrics:
        """The metrics of one model. Call once per model."""
        return ModelMetrics(self, model)


class ModelMetrics:
    """One model's metrics. They have the names of those in :class:`GatewayMetrics`; the label ``model`` is filled in."""

    def __init__(self, of_all: GatewayMetrics, model: str) -> None:
        self.registry = of_all.registry
        self.wire = of_all.wire
        self.tokens = of_all.tokens.of(model)
        self.attempts = _Labelled(of_all.attempts, model)
        self.prompt_ways = _Labelled(of_all.prompt_ways, model)
        self.queued = of_all.queued.labels(model)
        self.refused = _Labelled(of_all.refused, model)
        self.queued_s = of_all.queued_s.labels(model)
        self.workers_up = _Labelled(of_all.workers_up, model)
        self.workers_refused = of_all.workers_refused.labels(model)
        self.distrusted_workers = _Labelled(of_all.distrusted_workers, model)
        self.worker_requests = _Labelled(of_all.worker_requests, model)
        self.worker_kv_blocks = _Labelled(of_all.worker_kv_blocks, model)
        self.breakers_open = _Labelled(of_all.breakers_open, model)
        self.ttft_s = of_all.ttft_s.labels(model)
        self.e2e_s = of_all.e2e_s.labels(model)
        self.part_s = _Labelled(of_all.part_s, model)


class _Labelled(Generic[M]):
    """A metric whose first label is set."""

    _metric: M

    def __init__(self, metric: M, first: str) -> None:
        self._metric = metric
        self._first = first

    def labels(self, *others: str) -> M:
        """Like prometheus_client's ``labels``, for the other labels."""
        labelled: M = self._metric.labels(self._first, *others)
        return labelled


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
    """Counts refused connections and logs at most one line a second, so that a flood of them does not flood the log."""

    def __init__(self, counter: Counter, clock: Clock) -> None:
        """``counter`` has one label, the reason."""
        self._counter = counter
        self._warnings = RareWarnings(logger, clock)
        for reason in Reason:
            counter.labels(reason)  # from 0 on, so that alerts see the first increase

    def count(self, reason: Reason, detail: str, client: tuple[str, int] | None) -> None:
        """Count one refusal. ``detail`` and the ``client``'s address go to the log."""
        self._counter.labels(reason).inc()
        # uvicorn knows no client whose connection ended before it was looked at.
        who = "a client" if client is None else host_port(*client)
        self._warnings.warn(f"ended the connection of {who}: {detail}", str(reason))
