"""An upgrade to the next version and back, under sixteen streams. The engine is the fake one.

The upgrade starts at the newest release, or at this tree if there is none. Its images are changed by
``next_version.py``: a higher version, a protocol number one higher, and one more field in every message.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import ROOT, Cluster, Release, wait_for
from .conftest import release_of
from .load import Load, assert_same_answers, failures, summary
from .test_changes import PACE


@pytest.fixture(scope="module")
def old(cluster: Cluster) -> Iterator[Release]:
    """A release of the old version with two gateways, two prefill and two decode workers. Every prompt is handed
    over."""
    if cluster.next_tag is None:
        pytest.skip("KVRELAY_TEST_NEXT_TAG is not set: there are no images to upgrade to")
    values = {
        "image": {"tag": cluster.old_tag},
        "gateway": {"settings": {"local_prefill": "fallback"}},
        "prefill": {"settings": PACE},
        "decode": {"settings": PACE},
    }
    yield from release_of(cluster, "kvrelay-upgrade", values, cluster.old_tree / "helm")


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """This chart with the next version's number."""
    chart = shutil.copytree(ROOT / "helm", tmp_path / "helm")
    lines = (chart / "Chart.yaml").read_text().splitlines()
    keys = {"version": "version: 99.0.0", "appVersion": 'appVersion: "99.0.0"'}
    (chart / "Chart.yaml").write_text("\n".join(keys.get(line.split(":")[0], line) for line in lines) + "\n")
    return chart


def images(release: Release) -> set[str]:
    """The image tags of all pods."""
    return {pod["spec"]["containers"][0]["image"].rsplit(":", 1)[1] for pod in release.pods()}


def protocols(release: Release, component: str, says: str) -> set[int]:
    """The protocol numbers of new connections, from the logs of a component's pods."""
    found: set[int] = set()
    for pod in release.ready(component):
        log = release.cluster.log(release.namespace, pod["metadata"]["name"])
        messages = [json.loads(line)["message"] for line in log.splitlines() if line.startswith("{")]
        told = [message for message in messages if says in message and "protocol " in message]
        found |= {int(message.rsplit("protocol ", 1)[1]) for message in told}
    return found


def num_refused(release: Release) -> float:
    """The number of Hellos and messages that workers refused."""
    lines = [
        line
        for component, port in (("prefill-worker", 7180), ("decode-worker", 7280))
        for pod in release.ready(component)
        for line in release.metrics(pod, port).splitlines()
        if line.startswith(("kvrelay_refused_hellos_total", "kvrelay_refused_messages_total"))
    ]
    return sum(float(line.split()[-1]) for line in lines)


def test_upgraded_and_rolled_back_under_load(
    old: Release, cluster: Cluster, nodes: list[str], next_chart: Path
) -> None:
    """The decode pool is upgraded under the old chart, then everything under the new chart, then everything is rolled
    back. No request fails, answers stay equal, and no worker refuses a message."""
    release = old
    assert cluster.next_tag is not None
    kubectl, namespace = cluster.kubectl, ("-n", release.namespace)
    with Load(release, node=nodes[0]) as load:
        with load.watched(rounds=2) as results:
            deployment = "deployment/relay-kvrelay-decode-worker"
            kubectl("set", "image", deployment, *namespace, f"worker=kvrelay-worker:{cluster.next_tag}")
            kubectl("rollout", "status", deployment, *namespace, "--timeout=200s", timeout_s=220)
        print(summary("decode workers alone upgraded to the next version", results))
        assert failures(results) == []
        mixed = max(protocols(release, "prefill-worker", "connected to decode worker"))
        assert num_refused(release) == 0

        with load.watched() as results:
            release.chart = next_chart
            release.upgrade({"image": {"tag": cluster.next_tag}})
            wait_for("the old pods to be gone", lambda: images(release) == {cluster.next_tag})
        print(summary("everything upgraded", results))
        assert failures(results) == []
        assert mixed < max(protocols(release, "prefill-worker", "connected to decode worker")), (
            "old ones spoke the old one"
        )
        assert num_refused(release) == 0

        with load.watched() as results:
            release.roll_back(1)
            wait_for("the new pods to be gone", lambda: images(release) == {cluster.old_tag})
        print(summary("rolled back", results))
        assert failures(results) == []
        assert num_refused(release) == 0
        assert_same_answers(load.stop())
