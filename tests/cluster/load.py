"""Streams of requests from inside the cluster, and their results."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cluster import Release, is_ready, wait_for

SCRIPT = Path(__file__).with_name("client.py")
Result = dict[str, Any]


class Load:
    """``num_streams`` clients in a pod on node ``node``. Use as a context."""

    def __init__(
        self, release: Release, *, num_streams: int = 16, max_tokens: int = 80, node: str, api_key: str | None = None
    ) -> None:
        self._release = release
        self._name = "streams"
        self._arguments = [str(num_streams), str(max_tokens), *([] if api_key is None else [api_key])]
        self._node = node
        self.num_streams = num_streams

    def __enter__(self) -> Load:
        release = self._release
        kubectl = release.cluster.kubectl
        namespace = ("-n", release.namespace)
        kubectl("delete", "pod", self._name, *namespace, "--ignore-not-found", "--wait", "--grace-period=0")
        kubectl("delete", "configmap", self._name, *namespace, "--ignore-not-found")
        kubectl("create", "configmap", self._name, *namespace, f"--from-file=client.py={SCRIPT}")
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self._name},
            "spec": {
                "nodeName": self._node,
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        "name": "client",
                        "image": f"kvrelay-gateway:{release.cluster.tag}",
                        "command": ["python", "/client/client.py", "http://relay-kvrelay-gateway", *self._arguments],
                        "volumeMounts": [{"name": "client", "mountPath": "/client"}],
                    }
                ],
                "volumes": [{"name": "client", "configMap": {"name": self._name}}],
            },
        }
        kubectl("apply", *namespace, "-f", "-", text=json.dumps(pod))
        wait_for("the client pod", lambda: [pod for pod in self._pods() if is_ready(pod)])
        return self

    def __exit__(self, *_: object) -> None:
        self._release.cluster.kubectl(
            "delete", "pod", self._name, "-n", self._release.namespace, "--grace-period=0", "--force",
            "--ignore-not-found", is_checked=False,
        )  # fmt: skip

    @contextlib.contextmanager
    def watched(self, rounds: int = 1) -> Iterator[list[Result]]:
        """Collect the requests that end from now until every stream has ``rounds`` more answers after the block. The
        list is filled after the block."""
        wait_for("the streams to run", self.results)
        seen: list[Result] = []
        num_before = len(self.results())
        yield seen
        self.wait_more(rounds)
        seen += self.results()[num_before:]

    def results(self) -> list[Result]:
        """The results of all requests that have ended, in the order of their ends."""
        return [json.loads(line) for line in self._lines() if line.startswith("{")]

    def wait_more(self, rounds: int = 1, timeout_s: float = 120.0) -> None:
        """Wait until every stream has ended ``rounds`` more requests."""
        before = Counter(result["stream"] for result in self.results())

        def enough() -> bool:
            now = Counter(result["stream"] for result in self.results())
            return all(now[stream] >= before[stream] + rounds for stream in range(self.num_streams))

        wait_for(f"{rounds} more answers to each of {self.num_streams} streams", enough, timeout_s, every_s=0.5)

    def stop(self) -> list[Result]:
        """Begin no new requests, wait for the running ones, and return the results of all."""
        self._release.execute(self._name, "touch", "/tmp/stop")
        wait_for("the streams to end", lambda: "done" in self._lines()[-1:], timeout_s=120)
        return self.results()

    def _pods(self) -> list[dict[str, Any]]:
        release = self._release
        return release.cluster.pods(release.namespace, field_selector=f"metadata.name={self._name}")

    def _lines(self) -> list[str]:
        return self._release.cluster.log(self._release.namespace, self._name).splitlines()


def whole(results: list[Result]) -> list[Result]:
    """The requests whose answers are complete."""
    return [result for result in results if result["error"] is None]


def failures(results: list[Result]) -> list[Result]:
    """The requests that failed."""
    return [result for result in results if result["error"] is not None]


def assert_same_answers(results: list[Result]) -> None:
    """Check that all complete answers of a stream are equal, as its requests are."""
    digests: dict[int, set[tuple[str, str]]] = {}
    for result in whole(results):
        digests.setdefault(result["stream"], set()).add((result["digest"], result["finish"]))
    assert all(len(found) == 1 for found in digests.values()), digests


def summary(what: str, results: list[Result]) -> str:
    """Counts and times of these requests, in one line."""

    def spread(name: str) -> str:
        values = sorted(result[name] for result in results)
        return f"median {values[len(values) // 2]:.2f} s, worst {values[-1]:.2f} s"

    return (
        f"{what}: {len(results)} requests, {len(failures(results))} failed; until the first text: {spread('wait_s')}; "
        f"longest silence behind it: {spread('silence_s')}"
    )
