"""A Kubernetes cluster for tests: kubectl and helm as processes, and a release of the chart.

Tests poll pods and logs over one connection, because a kubectl process for each poll would load a small machine.

The environment describes the cluster:

    KUBECONFIG                 the cluster; tests are skipped without it
    KVRELAY_TEST_MODELS        directory on every node with the demo model and the output of fewer_heads.py, readable for all
    KVRELAY_TEST_TAG           tag of the images kvrelay-gateway and kvrelay-worker on every node; tests are skipped without it
    KVRELAY_TEST_NEXT_TAG      tag of images changed by next_version.py; tests of upgrades to them are skipped without it
    KVRELAY_TEST_OLD_TREE      source tree of the release that upgrades start at; this tree without it
    KVRELAY_TEST_OLD_TAG       tag of that release's images
    KVRELAY_TEST_HELM          the helm command
    KVRELAY_TEST_CRASH_NODE    command that ends a node abruptly, {} is its name; no node is crashed without it
    KVRELAY_TEST_START_NODE    command that starts the node again
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"
T = TypeVar("T")

CPU_POOL: dict[str, Any] = {
    "replicas": 2,
    "gpu": {"resource": ""},
    "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    "sharedMemory": "64Mi",
    "settings": {"threads": 1, "drain_s": 10, "canary_period_s": 2},
}
VALUES: dict[str, Any] = {
    "image": {"pullPolicy": "IfNotPresent"},
    "model": {"name": MODEL, "source": "volume"},
    "gateway": {
        "replicas": 2,
        "preStopSeconds": 3,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "settings": {"drain_s": 30},
    },
    "prefill": CPU_POOL,
    "decode": CPU_POOL,
}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``more`` laid over it."""
    result = dict(base)
    for key, value in more.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 90.0, every_s: float = 0.2) -> T:
    """Poll ``look`` until its result is true, and return that result. Fails after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)


@dataclass(frozen=True)
class Cluster:
    """The cluster that ``KUBECONFIG`` names."""

    helm_command: tuple[str, ...]
    models: str
    tag: str
    next_tag: str | None
    old_tag: str
    old_tree: Path
    crash: str | None
    start: str | None

    @classmethod
    def from_environment(cls) -> Cluster:
        """The cluster that the environment variables describe."""
        get = os.environ.get
        tag = get("KVRELAY_TEST_TAG", "test")
        return cls(
            helm_command=tuple(shlex.split(get("KVRELAY_TEST_HELM", "helm"))),
            models=get("KVRELAY_TEST_MODELS", "/models"),
            tag=tag,
            next_tag=get("KVRELAY_TEST_NEXT_TAG"),
            old_tag=get("KVRELAY_TEST_OLD_TAG", tag),
            old_tree=Path(get("KVRELAY_TEST_OLD_TREE", ROOT)),
            crash=get("KVRELAY_TEST_CRASH_NODE"),
            start=get("KVRELAY_TEST_START_NODE"),
        )

    def kubectl(self, *arguments: str, text: str | None = None, is_checked: bool = True, timeout_s: float = 120) -> str:
        """Run kubectl and return its output."""
        return _run(["kubectl", *arguments], text, is_checked, timeout_s)

    def helm(self, *arguments: str, text: str | None = None, timeout_s: float = 300) -> str:
        """Run helm and return its output."""
        return _run([*self.helm_command, *arguments], text, True, timeout_s)

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """Objects of a kind."""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *arguments, "-o", "json"))["items"]
        return items

    @cached_property
    def _api(self) -> client.CoreV1Api:
        config.load_kube_config()
        return client.CoreV1Api()

    def pods(self, namespace: str, **selectors: str) -> list[dict[str, Any]]:
        """Pods of a namespace. ``selectors``: ``label_selector``, ``field_selector``."""
        answer = self._api.list_namespaced_pod(namespace, _preload_content=False, **selectors)
        items: list[dict[str, Any]] = json.loads(answer.data)["items"]
        return items

    def log(self, namespace: str, pod: str) -> str:
        """The log of a pod's only container."""
        answer = self._api.read_namespaced_pod_log(pod, namespace, _preload_content=False)
        return str(answer.data, "utf-8")

    def crash_node(self, name: str) -> None:
        """End a node abruptly."""
        assert self.crash is not None
        _run(shlex.split(self.crash.replace("{}", name)), None, True, 60)

    def start_node(self, name: str) -> None:
        """Start a node again after ``crash_node``."""
        assert self.start is not None
        _run(shlex.split(self.start.replace("{}", name)), None, True, 120)

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A new namespace, deleted with everything in it afterwards."""
        self.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait", timeout_s=180)
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", is_checked=False)


class Release:
    """kvrelay on the cluster, in a namespace of its own."""

    def __init__(self, cluster: Cluster, namespace: str, values: dict[str, Any]) -> None:
        self.cluster = cluster
        self.namespace = namespace
        mine = {"image": {"tag": cluster.tag}, "model": {"volume": {"hostPath": cluster.models}}}
        self.values = merged(merged(VALUES, mine), values)
        self.chart = ROOT / "helm"

    def install(self, *, waits: bool = True) -> None:
        """``helm upgrade --install`` with the values. Returns when everything is ready, or at once if ``waits`` is
        false."""
        self.cluster.helm(
            "upgrade", "--install", "relay", str(self.chart), "-n", self.namespace, "--values", "-",
            *(("--wait", "--timeout", "400s") if waits else ()), text=json.dumps(self.values), timeout_s=420,
        )  # fmt: skip

    def upgrade(self, values: dict[str, Any]) -> None:
        """``helm upgrade`` with ``values`` merged over the current ones. Returns when everything is ready."""
        self.values = merged(self.values, values)
        self.install()

    def roll_back(self, revision: int) -> None:
        """``helm rollback``; returns when everything is ready."""
        self.cluster.helm("rollback", "relay", str(revision), "-n", self.namespace, "--wait", "--timeout", "240s")

    def uninstall(self) -> None:
        """``helm uninstall``, and wait for the pods."""
        self.cluster.helm("uninstall", "relay", "-n", self.namespace, "--wait")
        wait_for("the pods to be gone", lambda: not self.pods())

    def pods(self, component: str = "") -> list[dict[str, Any]]:
        """The pods of the release, or of one of its components."""
        more = f",app.kubernetes.io/component={component}" if component else ""
        return self.cluster.pods(self.namespace, label_selector=f"app.kubernetes.io/instance=relay{more}")

    def ready(self, component: str) -> list[dict[str, Any]]:
        """The pods of a component that take traffic."""
        return [pod for pod in self.pods(component) if is_ready(pod)]

    def scale(self, sizes: dict[str, int]) -> None:
        """Scale each component to its number of pods. Returns when those are ready and all others are gone."""
        for component, replicas in sizes.items():
            deployment = f"deployment/relay-kvrelay-{component}"
            self.cluster.kubectl("scale", "-n", self.namespace, deployment, f"--replicas={replicas}")

        def is_done() -> bool:
            pods = {name: self.pods(name) for name in sizes}
            return all(len(pods[name]) == number == sum(map(is_ready, pods[name])) for name, number in sizes.items())

        wait_for(f"{sizes}", is_done)

    def execute(self, pod: str, *command: str, is_checked: bool = True) -> str:
        """Run a command in a pod and return its output."""
        return self.cluster.kubectl("exec", "-n", self.namespace, pod, "--", *command, is_checked=is_checked)

    def metrics(self, pod: dict[str, Any], port: int) -> str:
        """The text of a pod's /metrics."""
        url = f"http://{pod['status']['podIP']}:{port}/metrics"
        script = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=10).read().decode())"
        return self.execute(pod["metadata"]["name"], "python", "-c", script)


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is Ready and not being deleted."""
    conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])}
    return "deletionTimestamp" not in pod["metadata"] and conditions.get("Ready") == "True"


def _run(command: list[str], text: str | None, is_checked: bool, timeout_s: float) -> str:
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert ended.returncode == 0 or not is_checked, f"{' '.join(command)}: {ended.stderr[-2000:]}"
    return ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
