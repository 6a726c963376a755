"""Decode workers of two pods with one rank each, under sixteen streams. When a pod is lost its whole worker restarts,
and no request fails.

The demo model's nine query heads cannot be split over two ranks, so these workers serve the output of
``fewer_heads.py``. The tests depend on each other's order: one worker becomes two, both are changed, and one remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from .cluster import Cluster, Release, is_ready, wait_for
from .conftest import release_of
from .fewer_heads import NAME
from .load import Load, assert_same_answers, failures, summary

NUM_PODS = 2  # per worker
SET = "relay-kvrelay-decode-worker"


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release with one gateway, one prefill worker of one rank, and one decode worker of two pods."""
    small = {"dtype": "float32", "kv_memory_mb": 64}
    values = {
        "model": {"name": NAME},
        "gateway": {"replicas": 1, "settings": {"local_prefill": "fallback"}},
        "prefill": {"replicas": 1, "settings": small},
        "decode": {"replicas": 1, "tensorParallel": NUM_PODS, "nodesPerWorker": NUM_PODS, "settings": small},
    }
    yield from release_of(cluster, "kvrelay-nodes", values)


@pytest.fixture(scope="module")
def load(release: Release, nodes: list[str]) -> Iterator[Load]:
    """Sixteen streams for all tests of the module."""
    with Load(release, node=nodes[0], num_streams=16, max_tokens=32) as load:
        yield load


def changed(what: str, load: Load, release: Release, change: Callable[[], None]) -> None:
    """Run ``change`` under load until all pods are ready. No request may fail, and answers must stay equal."""
    with load.watched() as results:
        began_s = time.monotonic()
        change()
        wait_for("all pods to be ready again", lambda: has(release, len(release.pods("decode-worker"))), 180)
        took_s = time.monotonic() - began_s
    print(f"{summary(what, results)}; whole again after {took_s:.1f} s")
    assert failures(results) == []
    assert_same_answers(load.results())


def has(release: Release, num_pods: int) -> bool:
    pods = release.pods("decode-worker")
    return len(pods) == num_pods and all(map(is_ready, pods))


def uid_of(release: Release, ordinal: int) -> str:
    found = [pod for pod in release.pods("decode-worker") if pod["metadata"]["name"] == f"{SET}-{ordinal}"]
    return found[0]["metadata"]["uid"] if found else ""


def has_restarted(release: Release, ordinal: int, before: str) -> bool:
    """Whether the pod's container has started again since ``before``."""
    return started(release, ordinal) not in ("", before)


def started(release: Release, ordinal: int) -> str:
    for pod in release.pods("decode-worker"):
        if pod["metadata"]["name"] == f"{SET}-{ordinal}":
            (container,) = pod["status"].get("containerStatuses", [{}])
            return str(container.get("state", {}).get("running", {}).get("startedAt", ""))
    return ""


def scale(release: Release, num_workers: int) -> None:
    number = num_workers * NUM_PODS
    release.cluster.kubectl("scale", "-n", release.namespace, f"statefulset/{SET}", f"--replicas={number}")
    release.values["decode"]["replicas"] = num_workers  # else an upgrade would restore the installed number
    wait_for(f"{number} pods", lambda: has(release, number), 180)


def num_known(release: Release) -> float:
    """The number of decode workers that the gateway is connected to."""
    (gateway,) = release.ready("gateway")
    (line,) = [
        line
        for line in release.metrics(gateway, 8000).splitlines()
        if line.startswith("kvrelay_workers_up{") and 'role="decode"' in line
    ]
    return float(line.split()[-1])


def test_a_worker_is_added_whole(release: Release, load: Load) -> None:
    changed("a second decode worker of 2 pods", load, release, partial(scale, release, 2))


def test_gateways_know_the_first_pod_of_each_worker_only(release: Release, load: Load) -> None:
    assert len(release.pods("decode-worker")) == 2 * NUM_PODS
    wait_for("two decode workers", lambda: num_known(release) == 2)
    load.wait_more()
    assert num_known(release) == 2
    assert failures(load.results()) == []


@pytest.mark.parametrize("ordinal", [1, NUM_PODS], ids=["one-that-has-a-rank", "one-that-leads"])
def test_a_pod_that_is_deleted_takes_its_worker_along_and_no_request(
    release: Release, load: Load, ordinal: int
) -> None:
    leader = ordinal - ordinal % NUM_PODS
    other = NUM_PODS - leader
    before = uid_of(release, ordinal), started(release, leader), started(release, other)

    def delete() -> None:
        release.cluster.kubectl("delete", "pod", f"{SET}-{ordinal}", "-n", release.namespace, "--wait=false")
        wait_for("another pod", lambda: uid_of(release, ordinal) not in ("", before[0]))
        wait_for("the worker to begin anew", lambda: has_restarted(release, leader, before[1]))

    changed(f"pod {ordinal} of decode workers of {NUM_PODS} pods is deleted", load, release, delete)
    assert started(release, other) == before[2], "the other worker has nothing to do with it"


def test_a_rank_that_is_killed_ends_its_worker_which_says_why(release: Release, load: Load) -> None:
    """A rank's process is killed: its worker restarts, and the leader's log names the lost rank. The worker's leader
    pod is new, because Kubernetes delays a container's second restart."""
    leader, ordinal = NUM_PODS, 2 * NUM_PODS - 1
    before = started(release, leader)
    script = (
        "import os, signal\nfrom pathlib import Path\n"
        "for path in Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    if b'kvrelay.engine.rank_main' in path.read_bytes().split(b'\\0'):\n"
        "        os.kill(int(path.parent.name), signal.SIGKILL)\n"
    )

    def kill() -> None:
        release.execute(f"{SET}-{ordinal}", "python", "-c", script)
        wait_for("the worker to begin anew", lambda: has_restarted(release, leader, before))

    changed("a rank of a decode worker is killed", load, release, kill)
    said = release.cluster.kubectl("logs", f"{SET}-{leader}", "-n", release.namespace, "--previous")
    assert f"of {SET}-{ordinal}) is gone" in said


def test_an_upgrade_replaces_one_worker_while_the_other_serves(release: Release, load: Load) -> None:
    """An upgrade, to the next version if there is one, replaces every pod under load. No request fails. Ranks join only
    a leader of their own version, so a worker serves again after its last pod is replaced."""
    before = {pod["metadata"]["uid"] for pod in release.pods("decode-worker")}
    next_tag = release.cluster.next_tag
    change = (
        {"decode": {"podAnnotations": {"example.com/version": "2"}}}
        if next_tag is None
        else {"image": {"tag": next_tag}}
    )
    with_change = partial(release.upgrade, change)
    changed(f"decode workers of {NUM_PODS} pods are upgraded", load, release, with_change)
    assert not before & {pod["metadata"]["uid"] for pod in release.pods("decode-worker")}


def test_a_worker_is_taken_away_whole(release: Release, load: Load) -> None:
    changed("one decode worker of 2 pods again", load, release, partial(scale, release, 1))
