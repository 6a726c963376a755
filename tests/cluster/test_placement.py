"""Placement of pods on nodes with GPUs: count, selector, spread and taint. Fake nodes suffice, as no pod has to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster import Cluster, Release, wait_for

GPU = "nvidia.com/gpu"
COMPONENTS = ("prefill-worker", "decode-worker")


@pytest.fixture(scope="module")
def gpus(cluster: Cluster) -> dict[str, int]:
    """The number of GPUs of each node that has any."""
    found = {
        node["metadata"]["name"]: int(node["status"]["allocatable"].get(GPU, "0")) for node in cluster.get("nodes")
    }
    found = {name: count for name, count in found.items() if count}
    if len(found) < 2:
        pytest.skip("fewer than two nodes with GPUs")
    return found


@pytest.fixture
def release(cluster: Cluster, gpus: dict[str, int]) -> Iterator[Release]:
    """A release that the test installs."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
    }

    def pool(role: str, num_ranks: int) -> dict[str, Any]:
        labels = {"labelSelector": {"matchLabels": {"kvrelay.dev/role": role}}}
        return {
            "tensorParallel": num_ranks,
            "gpu": {"resource": GPU},
            # Without this selector, nodes without GPUs count as empty nodes of the spread.
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
            "topologySpreadConstraints": [spread | labels],
        }

    with cluster.namespace("kvrelay-placement") as namespace:
        yield Release(cluster, namespace, {"prefill": pool("prefill", 1), "decode": pool("decode", 2)})
        cluster.helm("uninstall", "relay", "-n", namespace)
        # Pods on fake nodes never report their end.
        cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period=0", "--force")


def placed(release: Release, component: str, replicas: int) -> list[dict[str, Any]]:
    """The pods of a component, once the scheduler has decided on each."""

    def decided() -> list[dict[str, Any]] | None:
        pods = release.pods(component)
        is_done = len(pods) == replicas and all(
            any(condition["type"] == "PodScheduled" for condition in pod["status"].get("conditions", []))
            for pod in pods
        )
        return pods if is_done else None

    return wait_for(f"{replicas} pods of {component} to be placed, or not", decided)


def nodes_of(pods: list[dict[str, Any]]) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")]


def test_workers_are_where_gpus_are_evenly(release: Release, gpus: dict[str, int]) -> None:
    """Three prefill and four decode workers are spread evenly over the GPU nodes. Gateways are on other nodes."""
    release.values["prefill"]["replicas"] = 3
    release.values["decode"]["replicas"] = 4
    release.install(waits=False)
    prefill, decode = placed(release, "prefill-worker", 3), placed(release, "decode-worker", 4)
    for pods in (prefill, decode):
        counts = Counter(nodes_of(pods))
        assert set(counts) <= set(gpus)
        assert sum(counts.values()) == len(pods)
        assert max(counts.values()) - min(counts.get(node, 0) for node in gpus) <= 1
    used = Counter(nodes_of(prefill)) + Counter(nodes_of(decode)) + Counter(nodes_of(decode))
    assert all(used[node] <= count for node, count in gpus.items())
    assert not set(nodes_of(placed(release, "gateway", 2))) & set(gpus)


def test_a_selector_is_obeyed(release: Release, gpus: dict[str, int]) -> None:
    chosen = sorted(gpus)[-1]
    release.values["decode"] |= {
        "replicas": 2,
        "nodeSelector": {"nvidia.com/gpu.present": "true", "kubernetes.io/hostname": chosen},
        "topologySpreadConstraints": [],
    }
    release.install(waits=False)
    assert nodes_of(placed(release, "decode-worker", 2)) == [chosen, chosen]


def test_more_than_there_is_waits_and_says_why(release: Release, gpus: dict[str, int]) -> None:
    """With two GPUs a worker, one decode worker too many stays pending and names the missing resource. A prefill worker
    that asks for an unknown resource stays pending, too."""
    fit = sum(count // 2 for count in gpus.values())
    release.values["decode"]["replicas"] = fit + 1
    release.values["prefill"] |= {"replicas": 1, "gpu": {"resource": "nvidia.com/mig-3g.40gb"}}
    release.install(waits=False)
    decode = placed(release, "decode-worker", fit + 1)
    taken = 1 if len(nodes_of(placed(release, "prefill-worker", 1))) else 0
    assert taken == 0
    assert len(nodes_of(decode)) == fit
    (waiting,) = [pod for pod in decode if not pod["spec"].get("nodeName")]
    (condition,) = [each for each in waiting["status"]["conditions"] if each["type"] == "PodScheduled"]
    assert condition["reason"] == "Unschedulable"
    assert f"Insufficient {GPU}" in condition["message"]
