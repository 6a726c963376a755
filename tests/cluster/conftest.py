"""One cluster for the session. Every test file installs its own release into its own namespace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .cluster import ROOT, Cluster, Release


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests, and skip them where no cluster is named."""
    reason = ""
    if not os.environ.get("KUBECONFIG") or not os.environ.get("KVRELAY_TEST_TAG"):
        reason = "no cluster for tests: KUBECONFIG and KVRELAY_TEST_TAG are not both set"  # never an arbitrary one
    elif shutil.which("kubectl") is None:
        reason = "no kubectl"
    for item in items:
        if "tests/cluster" in item.path.as_posix():
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster that the environment names."""
    return Cluster.from_environment()


@pytest.fixture(scope="session")
def nodes(cluster: Cluster) -> list[str]:
    """Names of the nodes without taints, which run any pod. Nodes with GPUs usually have a taint."""
    nodes = cluster.get("nodes")
    schedulable = [node for node in nodes if not node["spec"].get("taints") and not node["spec"].get("unschedulable")]
    return sorted(node["metadata"]["name"] for node in schedulable)


def release_of(
    cluster: Cluster, namespace: str, values: dict[str, Any], chart: Path = ROOT / "helm"
) -> Iterator[Release]:
    """A release in a new namespace. Its pods and logs are printed if it does not become ready."""
    with cluster.namespace(namespace):
        release = Release(cluster, namespace, values)
        release.chart = chart
        try:
            release.install()
        except BaseException:
            print(cluster.kubectl("get", "pods,events", "-n", namespace, "-o", "wide", is_checked=False))
            for component in ("gateway", "prefill-worker", "decode-worker"):
                selector = f"app.kubernetes.io/component={component}"
                print(cluster.kubectl("logs", "-n", namespace, "-l", selector, "--tail=30", is_checked=False))
            raise
        yield release
