"""A HorizontalPodAutoscaler scales prefill workers by the number of waiting prompt tokens, while streams run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster, Release, is_ready, wait_for
from .conftest import release_of
from .load import Load, assert_same_answers, failures, summary

API = "v1beta1.custom.metrics.k8s.io"
# 2 ms for each prompt token: sixteen streams keep one worker about 6 s behind.
SLOW = {"engine": "fake", "fake_step_ms": 5, "fake_token_us": 2000, "num_blocks": 4096}
TARGET = {
    "type": "Pods",
    "pods": {
        "metric": {"name": "kvrelay_waiting_prompt_tokens"},
        "target": {"type": "AverageValue", "averageValue": "300"},
    },
}


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release with one prefill worker, which an HPA may scale to three."""
    hpa = {
        "enabled": True,
        "minReplicas": 1,
        "maxReplicas": 3,
        "metrics": [TARGET],
    }
    values = {
        "gateway": {"settings": {"local_prefill": "fallback"}},
        "prefill": {"settings": SLOW, "autoscaling": {"hpa": hpa}},
        "decode": {"settings": SLOW},
    }
    yield from release_of(cluster, "kvrelay-autoscaling", values)


@pytest.fixture
def adapter(release: Release) -> Iterator[None]:
    """The custom metrics API, which prometheus-adapter serves on other clusters."""
    cluster, namespace = release.cluster, release.namespace
    if cluster.kubectl("get", "apiservice", API, "--ignore-not-found"):
        pytest.skip(f"the cluster has {API} already")
    cluster.kubectl(
        "create", "configmap", "adapter", "-n", namespace, f"--from-file={Path(__file__).with_name('adapter.py')}"
    )
    account = f"--serviceaccount={namespace}:default"
    cluster.kubectl("create", "rolebinding", "adapter", "-n", namespace, "--clusterrole=view", account)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "adapter", "labels": {"app": "adapter"}},
        "spec": {
            "containers": [
                {
                    "name": "adapter",
                    "image": f"kvrelay-gateway:{cluster.tag}",
                    "command": ["python", "/adapter/adapter.py", namespace],
                    "volumeMounts": [{"name": "adapter", "mountPath": "/adapter"}],
                    "readinessProbe": {"tcpSocket": {"port": 6443}, "periodSeconds": 1},
                }
            ],
            "volumes": [{"name": "adapter", "configMap": {"name": "adapter"}}],
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "adapter"},
        "spec": {"selector": {"app": "adapter"}, "ports": [{"port": 443, "targetPort": 6443}]},
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API},
        "spec": {
            "service": {"name": "adapter", "namespace": namespace},
            "group": "custom.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
        },
    }
    for manifest in (pod, service):
        cluster.kubectl("apply", "-n", namespace, "-f", "-", text=json.dumps(manifest))
    wait_for(
        "the adapter",
        lambda: [pod for pod in cluster.pods(namespace, label_selector="app=adapter") if is_ready(pod)],
    )
    cluster.kubectl("apply", "-f", "-", text=json.dumps(api))
    try:
        yield
    finally:
        cluster.kubectl("delete", "apiservice", API)


def test_prefill_workers_follow_the_prompts_that_wait(release: Release, adapter: None, nodes: list[str]) -> None:
    assert len(release.pods("prefill-worker")) == 1
    with Load(release, node=nodes[0], max_tokens=8) as load:
        wait_for("more prefill workers", lambda: len(release.ready("prefill-worker")) >= 2, 120)
        load.wait_more()
        results = load.stop()
        most = len(release.pods("prefill-worker"))
    print(summary(f"prefill workers scaled 1 to {most} by an HPA", results))
    assert failures(results) == []
    assert_same_answers(results)
    (decode,) = release.cluster.get("deployments", "-n", release.namespace, "-l", "kvrelay.dev/role=decode")
    assert decode["status"]["readyReplicas"] == 2  # the decode pool was not scaled
