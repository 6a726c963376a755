"""The deployment changes while sixteen streams run; these tests check what the clients see. The engine is the fake
one."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from kvrelay.wire.security.keys import make_keys

from .cluster import Cluster, Release, is_ready, wait_for
from .conftest import release_of
from .load import Load, assert_same_answers, failures, summary, whole

COMPONENTS = ("gateway", "prefill-worker", "decode-worker")
ASK = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"prompt": "one two three four five six seven eight " * 8, "max_tokens": 4}).encode()
request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=120)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode())
"""
ASKING_S = 2.0  # the time that polling the API may take on a busy machine
# 20 ms for each step and 80 tokens: an answer takes 1.6 s, so every change meets streams in all their states.
PACE = {"engine": "fake", "fake_step_ms": 20, "fake_token_us": 100, "num_blocks": 4096}


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release with two gateways, two prefill workers and two decode workers."""
    values = {
        "gateway": {"settings": {"local_prefill": "fallback"}},
        "prefill": {"settings": PACE},
        "decode": {"settings": PACE},
    }
    yield from release_of(cluster, "kvrelay-changes", values)


@pytest.fixture(scope="module")
def load(release: Release, nodes: list[str]) -> Iterator[Load]:
    """Sixteen streams for all tests of the module, from the first node, which no test ends."""
    with Load(release, node=nodes[0]) as load:
        yield load


@contextlib.contextmanager
def unharmed(what: str, load: Load) -> Iterator[None]:
    """Check that no request fails during the block, and that equal requests get equal answers."""
    with load.watched() as results:
        yield
    print(summary(what, results))
    assert failures(results) == []
    assert_same_answers(load.results())


def test_both_pools_scale_up_and_down(release: Release, load: Load) -> None:
    """One pool grows while the other shrinks. No request fails."""
    with unharmed("decode workers scaled 2, 3, 1, 2, prefill workers 2, 1, 3, 2 at the same time", load):
        for decode, prefill in ((3, 1), (1, 3), (2, 2)):
            release.scale({"decode-worker": decode, "prefill-worker": prefill})
            load.wait_more()


def test_the_console_has_all_workers_by_the_names_of_their_pods(release: Release) -> None:
    gateway = release.ready("gateway")[0]

    def told(path: str) -> str:
        url = f"http://{gateway['status']['podIP']}:8000{path}"
        script = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=10).read().decode())"
        return release.execute(gateway["metadata"]["name"], "python", "-c", script)

    assert "<title>" in told("/console")
    pods = {pod["metadata"]["name"] for role in ("prefill-worker", "decode-worker") for pod in release.ready(role)}
    wait_for(
        "all of them", lambda: {worker["name"] for worker in json.loads(told("/debug/workers"))["workers"]} == pods
    )


@pytest.mark.parametrize("component", ["decode-worker", "prefill-worker", "gateway"])
def test_a_pod_is_deleted(release: Release, load: Load, component: str) -> None:
    """A pod is deleted with its grace period, as by a node's drain. No request fails."""
    victim = release.ready(component)[0]["metadata"]["name"]
    with unharmed(f"a {component} pod deleted", load):
        release.cluster.kubectl("delete", "pod", victim, "-n", release.namespace, "--wait=false")
        wait_for("it to be gone", lambda: all(pod["metadata"]["name"] != victim for pod in release.pods(component)))
        wait_for("another", lambda: len(release.ready(component)) == 2)


@pytest.mark.parametrize("component", ["decode-worker", "prefill-worker"])
def test_a_process_ends_in_the_midst(release: Release, load: Load, component: str) -> None:
    """A worker gets two signals, so it exits without finishing its requests. They continue on other workers. Kubernetes
    restarts the container, and no request fails."""
    victim = release.ready(component)[0]
    name, restarts = victim["metadata"]["name"], victim["status"]["containerStatuses"][0]["restartCount"]
    hurry = "import os, signal; os.kill(1, signal.SIGTERM); os.kill(1, signal.SIGINT)"

    def is_back() -> bool:
        (pod,) = [pod for pod in release.pods(component) if pod["metadata"]["name"] == name]
        return is_ready(pod) and pod["status"]["containerStatuses"][0]["restartCount"] > restarts

    lost_before = num_lost_attempts(release)
    with unharmed(f"a {component} ended in the midst", load):
        release.execute(name, "python", "-c", hurry, is_checked=False)
        wait_for("its restart", is_back)
    num_lost = num_lost_attempts(release) - lost_before
    print(f"{num_lost:.0f} attempts were lost with it, and made up for")
    if component == "decode-worker":  # a prefill worker may be between two prompts, which take 20 ms each
        assert num_lost > 0, "nothing ran on it: this showed nothing"


def num_lost_attempts(release: Release) -> float:
    """The number of attempts lost with their worker, over all gateways."""
    lines = [line for pod in release.ready("gateway") for line in release.metrics(pod, 8000).splitlines()]
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("kvrelay_attempts_total{") and 'outcome="peer_lost"' in line
    )


def test_all_keys_are_changed(release: Release, load: Load, tmp_path: Path) -> None:
    """The three steps of docs/kubernetes.md, under load: add the new keys, use the new keys, remove the old ones."""
    kubectl, namespace = release.cluster.kubectl, ("-n", release.namespace)
    selected = (*namespace, "--field-selector=metadata.name=relay-kvrelay-keys")

    def keys() -> dict[str, bytes]:
        (secret,) = release.cluster.get("secrets", *selected)
        return {name: base64.b64decode(text) for name, text in secret["data"].items()}

    old, new = keys(), {path.name: path.read_bytes() for path in make_keys(tmp_path)}
    both = {name: old[name] + new[name] for name in old if name.endswith(".pem")}
    private = {name: new[name] for name in new if name.endswith(".key")}
    with unharmed("all keys changed, in three restarts of everything", load):
        for changed in (both, private, new):
            patch = {"data": {name: base64.b64encode(text).decode() for name, text in changed.items()}}
            kubectl("patch", "secret", "relay-kvrelay-keys", *namespace, "--patch", json.dumps(patch))
            kubectl("rollout", "restart", "deployment", *namespace)
            for deployment in COMPONENTS:
                kubectl("rollout", "status", f"deployment/relay-kvrelay-{deployment}", *namespace, "--timeout=120s")
    assert keys() == new


def test_a_new_worker_takes_traffic_at_once(release: Release, load: Load) -> None:
    """A new decode worker has sampled tokens within 2 s after it is seen Ready, plus the time that polling takes."""
    known = {pod["metadata"]["name"] for pod in release.pods("decode-worker")}
    scale = ("scale", "-n", release.namespace, "deployment/relay-kvrelay-decode-worker")
    with unharmed("a new decode worker", load):
        release.cluster.kubectl(*scale, "--replicas=3")
        (pod,) = wait_for(
            "the new pod to be ready",
            lambda: [pod for pod in release.ready("decode-worker") if pod["metadata"]["name"] not in known],
            every_s=0.02,
        )
        ready_s = time.monotonic()
        metrics = f"/api/v1/namespaces/{release.namespace}/pods/{pod['metadata']['name']}:7280/proxy/metrics"

        def has_tokens() -> bool:
            lines = release.cluster.kubectl("get", "--raw", metrics).splitlines()
            return any(
                line.startswith("kvrelay_sampled_tokens_total ") and float(line.split()[1]) > 0 for line in lines
            )

        wait_for("its first tokens", has_tokens, every_s=0.02)
        took_s = time.monotonic() - ready_s
    print(f"a new decode worker generates {took_s:.2f} s after it was seen to be Ready")
    assert took_s < 2.0 + ASKING_S
    release.scale({"decode-worker": 2})


def test_a_node_crashes(release: Release, load: Load, nodes: list[str], cluster: Cluster) -> None:
    """A node crashes: its connections stay open and its pods are not deleted. Each stream has at most one error, and a
    complete answer within 20 s."""
    if cluster.crash is None or len(nodes) < 3:
        pytest.skip("KVRELAY_TEST_CRASH_NODE is not set, or there are fewer than three nodes")
    ready = [(component, pod) for component in COMPONENTS for pod in release.ready(component)]
    where = Counter(pod["spec"]["nodeName"] for _, pod in ready)
    victim = max(nodes[1:], key=lambda node: where[node])
    lost = [component for component, pod in ready if pod["spec"]["nodeName"] == victim]
    try:
        with load.watched(rounds=3) as results:
            crashed_s = time.time()
            cluster.crash_node(victim)
    finally:
        cluster.start_node(victim)
    print(summary(f"a node crashed, and with it {', '.join(lost)}", results))
    # A stream has recovered at the end of its first complete answer after the crash.
    recovered_s = [
        min(
            result["ended_s"]
            for result in whole(results)
            if result["stream"] == stream and result["ended_s"] > crashed_s
        )
        - crashed_s
        for stream in range(load.num_streams)
    ]
    print(
        f"until a stream had its next whole answer: median {median(recovered_s):.1f} s, worst {max(recovered_s):.1f} s"
    )
    errors = Counter(result["stream"] for result in failures(results))
    assert max(errors.values(), default=0) <= 1, failures(results)
    assert max(recovered_s) <= 20
    assert_same_answers(load.results())
    for component in COMPONENTS:
        wait_for(f"two of {component}", lambda component=component: len(release.ready(component)) == 2)


@pytest.mark.parametrize(
    ("component", "says"), [("decode-worker", "there is no decode worker"), ("prefill-worker", "")]
)
def test_a_pool_of_none(release: Release, component: str, says: str) -> None:
    """Without decode workers the gateway answers 503 with the reason. Without prefill workers, decode workers compute
    the prompts."""
    release.scale({component: 0})
    gateway = release.ready("gateway")[0]

    def status() -> tuple[int, str]:
        url = f"http://{gateway['status']['podIP']}:8000/v1/completions"
        code, _, body = release.execute(gateway["metadata"]["name"], "python", "-c", ASK, url).partition(" ")
        return int(code), body

    asked_s = time.monotonic()
    code, body = status()
    print(f"{component} scaled to none: {code} after {time.monotonic() - asked_s:.1f} s: {body[:120]}")
    assert code == (503 if says else 200)
    assert says in body
    release.scale({component: 2})
    wait_for("service", lambda: status()[0] == 200)
