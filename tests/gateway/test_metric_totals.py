"""The metrics of several processes as one's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.gateway.metric_totals import Family, Sample, added, exposition, lasting, snapshot
from kvrelay.gateway.metrics import SEEN_BY_ALL, GatewayMetrics


def values(families: list[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Of Prometheus' text, as somebody who scrapes it reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(families).decode())
        for sample in family.samples
    }


def process(num_requests: int, waits_s: list[float], num_up: int) -> list[Family]:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.requests.labels("/v1/completions", "200").inc(num_requests)
    metrics.queued.set_function(lambda: num_requests)
    metrics.workers_up.labels("decode").set(num_up)
    metrics.workers_refused.set(3 - num_up)
    for wait_s in waits_s:
        metrics.queued_s.observe(wait_s)
    return snapshot(metrics.registry)


def test_one_process_reads_as_itself() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.requests.labels("/a", "200").inc()
    metrics.ttft_s.observe(0.2)
    families = snapshot(metrics.registry)
    assert added([families]) == families
    assert exposition(families) == generate_latest(metrics.registry)


def test_counters_histograms_and_gauges_are_added_and_what_all_see_is_not() -> None:
    total = values(added([process(3, [0.02, 2.0], 2), process(4, [0.02], 1)], SEEN_BY_ALL))
    assert total["kvrelay_requests_total", (("outcome", "200"), ("route", "/v1/completions"))] == 7
    assert total["kvrelay_requests_queued", ()] == 7
    assert total["kvrelay_admission_wait_seconds_count", ()] == 3
    assert total["kvrelay_admission_wait_seconds_sum", ()] == 2.04
    assert total["kvrelay_admission_wait_seconds_bucket", (("le", "0.025"),)] == 2
    assert total["kvrelay_admission_wait_seconds_bucket", (("le", "+Inf"),)] == 3
    assert total["kvrelay_workers_up", (("role", "decode"),)] == 1  # one of them has lost a worker, and that shows
    assert total["kvrelay_workers_refused", ()] == 2


def test_what_began_later_does_not_look_like_a_restart() -> None:
    def begun(at_s: float) -> list[Family]:
        return [Family("a", "counter", "", (Sample("a_total", (), 1.0), Sample("a_created", (), at_s)))]

    assert values(added([begun(200.0), begun(100.0)]))["a_created", ()] == 100.0


def test_who_has_ended_counts_on_but_has_nothing_under_way() -> None:
    ended = lasting(process(5, [0.1], 2))
    total = values(added([process(1, [], 2), ended], SEEN_BY_ALL))
    assert total["kvrelay_requests_total", (("outcome", "200"), ("route", "/v1/completions"))] == 6
    assert total["kvrelay_admission_wait_seconds_count", ()] == 1
    assert total["kvrelay_requests_queued", ()] == 1
    again = values(added([lasting(added([ended, process(2, [0.3], 1)])), process(1, [], 2)], SEEN_BY_ALL))
    assert again["kvrelay_requests_total", (("outcome", "200"), ("route", "/v1/completions"))] == 8
