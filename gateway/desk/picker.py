"""Metrics for an endpoint picker of the Gateway API Inference Extension: vLLM's names, summed over all models.

The picker's protocol expects model servers that each have a queue and KV memory. A gateway reports the queue of its own requests
and the KV memory of the decode workers that it knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvrelay.gateway.model import Models


class PickerMetrics:
    """Implements prometheus_client's Collector. Made once per app, on its registry."""

    def __init__(self, models: Models, registry: CollectorRegistry) -> None:
        self._models = models
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics. Called by the registry."""
        admissions = [model.relay.admission for model in self._models]
        yield GaugeMetricFamily(
            "vllm:num_requests_waiting",
            "Requests of this gateway that wait for a place on workers",
            value=sum(one.num_queued for one in admissions),
        )
        yield GaugeMetricFamily(
            "vllm:num_requests_running",
            "Requests of this gateway that have their places",
            value=sum(one.num_running for one in admissions),
        )
        num_blocks: Counter[int] = Counter()  # by block size
        num_used = 0
        for worker in (worker for model in self._models for worker in model.pool.decodes.values()):
            if worker.welcome is not None and worker.status is not None:
                num_blocks[worker.welcome.card.layout.block_size] += worker.status.num_blocks
                num_used += worker.status.num_blocks - worker.status.num_free_blocks
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of the decode workers' KV blocks that is in use, 0 to 1, as they last reported",
            value=num_used / num_blocks.total() if num_blocks else 0.0,
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The decode workers' KV blocks: tokens of one, and how many there are",
            labels=["block_size", "num_gpu_blocks"],
        )
        for block_size, number in sorted(num_blocks.items()):
            config.add_metric([str(block_size), str(number)], 1)
        yield config
