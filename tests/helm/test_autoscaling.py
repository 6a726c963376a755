"""Autoscalers: their targets, their metrics, and refused combinations."""

from __future__ import annotations

import pytest

from kvrelay.engine.settings import sequences_at_a_time

from .chart import CHART, GROUPS, needs_helm, objects, refusal


@needs_helm
def test_two_autoscalers_are_refused() -> None:
    both = "prefill.autoscaling.hpa.enabled=true,prefill.autoscaling.keda.enabled=true"
    assert "prefill.autoscaling: hpa and keda are both enabled" in refusal(both)


@needs_helm
def test_keda_without_anything_to_ask_is_refused() -> None:
    said = refusal("prefill.autoscaling.keda.enabled=true")
    assert "prefill.autoscaling.keda: KEDA needs to know what to scale by; set prometheus" in said


@needs_helm
@pytest.mark.parametrize(("scaler", "own"), [("hpa", "metrics"), ("keda", "triggers")])
def test_pods_that_are_not_there_cannot_ask_for_the_first_one(scaler: str, own: str) -> None:
    to_nothing = f"prefill.autoscaling.{scaler}.enabled=true,prefill.autoscaling.{scaler}.minReplicas=0"
    said = refusal(f"{to_nothing},prefill.autoscaling.keda.prometheus=http://p")
    assert f"prefill.autoscaling.{scaler}.minReplicas is 0" in said
    assert f"give {own} of your own" in said
    objects("--set", f"{to_nothing},prefill.autoscaling.{scaler}.{own}[0].type=cron")


@needs_helm
def test_an_autoscaler_owns_the_replicas() -> None:
    plain, scaled = objects(), objects("--values", str(CHART / "examples/autoscaled.yaml"))
    for component in ("gateway", "prefill-worker", "decode-worker"):
        name = ("Deployment", f"relay-kvrelay-{component}")
        assert "replicas" in plain[name]["spec"]
        assert "replicas" not in scaled[name]["spec"]
    prefill = scaled["ScaledObject", "relay-kvrelay-prefill-worker"]["spec"]
    assert prefill["scaleTargetRef"]["name"] == "relay-kvrelay-prefill-worker"
    decode = scaled["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]
    assert decode["metrics"][0]["pods"]["metric"]["name"] == "kvrelay_kv_cache_usage_perc"


@needs_helm
@pytest.mark.parametrize(("resource", "device_type"), [("nvidia.com/gpu", "cuda"), ("", "cpu")])
def test_another_decode_worker_is_wanted_once_three_quarters_of_what_one_runs_do(
    resource: str, device_type: str
) -> None:
    found = objects("--set", f"decode.autoscaling.hpa.enabled=true,decode.gpu.resource={resource}")
    scaled = found["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]
    most = int(scaled["metrics"][1]["pods"]["target"]["averageValue"])
    assert most * 4 == sequences_at_a_time(None, device_type) * 3


@needs_helm
@pytest.mark.parametrize(
    "scaler", ["hpa.enabled=true", "keda.enabled=true,decode.autoscaling.keda.prometheus=http://p"]
)
def test_autoscalers_count_the_groups_of_a_leader_worker_set(scaler: str) -> None:
    found = objects("--set", f"{GROUPS},decode.autoscaling.{scaler}")
    name = "relay-kvrelay-decode-worker"
    kind = "HorizontalPodAutoscaler" if scaler.startswith("hpa") else "ScaledObject"
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": name}
    assert found[kind, name]["spec"]["scaleTargetRef"] == target
    assert "replicas" not in found["LeaderWorkerSet", name]["spec"]
