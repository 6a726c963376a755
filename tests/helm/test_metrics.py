"""The metrics that alerts, the dashboard and autoscalers query."""

from __future__ import annotations

import json
import re

from prometheus_client import CollectorRegistry

from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.worker.metrics import EngineMetrics

from .chart import CHART, MONITORING, needs_helm, objects


@needs_helm
def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    """Every metric in an expression exists in a gateway or a worker."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    EngineMetrics(registry, BlockManager(4, 4, lambda: 0.0), num_running=lambda: 0, num_waiting=lambda: 0)
    known = {sample.name for family in registry.collect() for sample in family.samples}
    known |= {
        name for family in registry.collect() for name in (family.name, f"{family.name}_total", f"{family.name}_sum")
    }
    known |= {f"{family.name}_{part}" for family in registry.collect() for part in ("bucket", "count")}
    # The prefill worker makes these itself; its own test reads them.
    known |= {"kvrelay_waiting_prompt_tokens", "kvrelay_longest_wait_seconds"}
    found = objects(*MONITORING)
    rules = found["PrometheusRule", "relay-kvrelay"]["spec"]["groups"][0]["rules"]
    dashboard = json.loads(found["ConfigMap", "relay-kvrelay-dashboard"]["data"]["kvrelay.json"])
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"kvrelay_[a-z0-9_]+", expression)}
    scaled = objects("--values", str(CHART / "examples/autoscaled.yaml"))
    names |= {
        metric["pods"]["metric"]["name"]
        for metric in scaled["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]["metrics"]
    }
    triggers = scaled["ScaledObject", "relay-kvrelay-prefill-worker"]["spec"]["triggers"]
    names |= {re.findall(r"kvrelay_[a-z_]+", trigger["metadata"]["query"])[0] for trigger in triggers}
    assert {"kvrelay_longest_wait_seconds", "kvrelay_num_requests_running"} <= names
    assert len(names) > 15
    assert names <= known, sorted(names - known)
