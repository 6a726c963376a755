"""Metrics that are counted by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.gateway.attempt import Take
from kvrelay.gateway.generation import Generation, Generator, TextDelta, Usage
from kvrelay.gateway.metrics import GatewayMetrics, TokenMeter
from kvrelay.gateway.progress import GenerationRequest, OutputDelta
from kvrelay.gateway.timings import RequestTimings
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.wire.messages import Timings

GAPS_S = (0.0, 0.001, 0.00100001, 0.02, 0.025, 4.999, 5.0, 5.1, 600.0)
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def test_the_meter_tells_what_prometheus_own_histogram_would() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    meter = TokenMeter(registry)
    text = "Time between two deliveries of tokens of a request"
    theirs = Histogram("kvrelay_inter_token_latency_seconds", text, buckets=BUCKETS, registry=other)
    meter.on_tokens(3, None)  # a request's first have no gap
    for gap_s in GAPS_S:
        meter.on_tokens(2, gap_s)
        theirs.observe(gap_s)
    ours = generate_latest(registry).decode().splitlines()
    expected = [line for line in generate_latest(other).decode().splitlines() if "_created" not in line]
    assert [line for line in ours if "inter_token" in line] == expected
    assert "kvrelay_gateway_output_tokens_total 21.0" in ours


async def test_a_first_token_is_written_before_it_is_counted(model_directory: Path) -> None:
    """Its histograms are behind the write, and once each; a second token has none of them."""

    class TwoTokens:
        async def run(self, request: GenerationRequest, take: Take) -> None:
            take(OutputDelta([SampledToken(65)], None, None, Timings(queue_s=0.1, prefill_s=0.2)))
            take(OutputDelta([SampledToken(66)], FinishReason.LENGTH, None, None))

    relay: Any = TwoTokens()
    registry = CollectorRegistry()
    counted_at_write: list[tuple[float | None, float | None]] = []

    def counted() -> tuple[float | None, float | None]:
        part = registry.get_sample_value("kvrelay_ttft_part_seconds_count", {"part": "prefill"})
        return registry.get_sample_value("kvrelay_time_to_first_token_seconds_count"), part

    def take(_: TextDelta) -> None:
        counted_at_write.append(counted())

    generator = Generator(relay, Tokenizer.load(model_directory), GatewayMetrics(registry), lambda: 0.0)
    await generator.run(Generation("r", [1], SamplingParams(max_tokens=2), RequestTimings(0.0)), Usage(1), take)
    assert counted_at_write == [(0.0, None)] * 2
    await asyncio.sleep(0)  # what is due on the loop
    assert counted() == (1.0, 1.0)
