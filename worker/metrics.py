"""A worker's own metrics: its scheduler and its pool. Also under vLLM's names where Kubernetes gateways expect these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrelay.engine.kv.block_manager import BlockManager

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics:
    """Gauges are computed when they are scraped; the worker increments the counters."""

    def __init__(
        self,
        registry: CollectorRegistry,
        blocks: BlockManager,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        def kv_usage() -> float:
            return 1.0 - blocks.num_allocatable / blocks.num_blocks

        def num_in(place: str) -> float:
            return float(getattr(blocks.ledger(), f"num_{place}"))

        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("num_requests_running", "Sequences in the running batch", num_running),
            ("num_requests_waiting", "Sequences that wait for room", num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks that are leased or running, 0 to 1", kv_usage),
        )
        for prefix in ("kvrelay_", "vllm:"):
            for name, text, read in gauges:
                Gauge(f"{prefix}{name}", text, registry=registry).set_function(read)
        ledger_gauge = Gauge("kvrelay_kv_blocks", "KV blocks by state", ["place"], registry=registry)
        for place in ("free", "cached", "leased", "running"):
            ledger_gauge.labels(place).set_function(partial(num_in, place))
        retained = Gauge("kvrelay_retained_blocks", "Cached KV blocks with a raised priority", registry=registry)
        retained.set_function(lambda: len(blocks.retained()))
        self.step_s = Histogram(
            "kvrelay_step_seconds", "Duration of a model step", buckets=_STEP_BUCKETS, registry=registry
        )
        self.prompt_tokens = Counter(
            "kvrelay_prompt_tokens_total", "Prompt tokens of admitted sequences", registry=registry
        )
        self.cached_tokens = Counter(
            "kvrelay_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.sampled_tokens = Counter("kvrelay_sampled_tokens_total", "Tokens sampled", registry=registry)
        self.preemptions = Counter(
            "kvrelay_preemptions_total",
            "Sequences that lost their blocks to others, to be recomputed",
            registry=registry,
        )
        self.canaries = Counter(
            "kvrelay_canaries_total",
            "Self-checks: computations of a known prompt",
            ["result"],
            registry=registry,
        )
        for result in ("same", "changed", "failed"):
            self.canaries.labels(result)
        self.failed_steps = Counter("kvrelay_failed_steps_total", "Model steps that raised", registry=registry)
