"""Discovery of pods, with the real Kubernetes client and a played API server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client, config

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.workers import discovery
from kvrelay.gateway.workers.discovery import Discovery, Pods, worker_of, workers_of
from kvrelay.gateway.workers.pool import FoundWorker
from kvrelay.wire.messages import Role

WAIT_S = 10.0

Answer = tuple[int, list[dict[str, Any]], bool]  # status, lines, whether the connection breaks after them


def pod(uid: str = "u", role: str | None = "decode", ip: str | None = "10.0.0.8", **changes: Any) -> dict[str, Any]:
    """A ready worker's pod, with ``changes``: ready, deleted, phase, ports."""
    metadata: dict[str, Any] = {"uid": uid, "name": uid, "resourceVersion": "1", "labels": {}}
    if role is not None:
        metadata["labels"]["kvrelay.dev/role"] = role
    if changes.get("deleted"):
        metadata["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if changes.get("ready", True) else "False"}
    status: dict[str, Any] = {
        "phase": changes.get("phase", "Running"),
        "conditions": [{"type": "Initialized", "status": "True"}, ready],
    }
    if ip is not None:
        status["podIP"] = ip
    ports = changes.get("ports", [{"name": "admin", "containerPort": 7280}, {"name": "control", "containerPort": 7200}])
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "other"}, {"name": "worker", "ports": ports}]},
        "status": status,
    }


def at(version: int, of: dict[str, Any]) -> dict[str, Any]:
    of["metadata"]["resourceVersion"] = str(version)
    return of


def uids(found: Sequence[FoundWorker]) -> list[str]:
    return [f"{worker.uid}{'' if worker.accepts else '-'}" for worker in found]


class _Kubernetes(BaseHTTPRequestHandler):
    """Answers lists and watches from ``server.answers``, in order, and keeps the queries."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        self.server.asked.append((path.path, {key: value[0] for key, value in parse_qs(path.query).items()}))
        if not self.server.answers:  # stays silent until the test is over
            self.server.is_watched.set()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.server.silent.wait(6 * WAIT_S)
            self.close_connection = True
            return
        status, lines, cut = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = json.dumps(line).encode() + b"\n"
            for part in (data[:7], data[7:]):  # a line may come in several chunks
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if not cut:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    asked: list[tuple[str, dict[str, str]]]
    answers: list[Answer]
    silent: threading.Event  # a request without an answer waits until this is set
    is_watched: threading.Event  # set when a request waits so


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), _Kubernetes) as made:
        made.asked, made.answers = [], []
        made.silent, made.is_watched = threading.Event(), threading.Event()
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def pods(server: Server) -> Iterator[Pods]:
    with client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}")) as api:
        yield Pods(client.CoreV1Api(api), "models", "app.kubernetes.io/name=kvrelay")


def listed(version: int, *of: dict[str, Any]) -> Answer:
    return 200, [{"items": of, "metadata": {"resourceVersion": str(version)}}], False


def watched(*events: tuple[str, dict[str, Any]]) -> Answer:
    return 200, [{"type": kind, "object": of} for kind, of in events], False


def test_every_change_is_told_once_and_the_watch_goes_on_where_it_ended(server: Server, pods: Pods) -> None:
    server.answers = [
        listed(10, pod("a")),
        watched(
            ("ADDED", at(11, pod("b", ip="10.0.0.9", ready=False))),
            ("MODIFIED", at(12, pod("b", ip="10.0.0.9"))),
            ("BOOKMARK", {"metadata": {"resourceVersion": "13"}}),
            ("MODIFIED", at(14, pod("b", ip="10.0.0.9"))),  # no change that matters
        ),
        watched(("MODIFIED", at(15, pod("a", deleted=True))), ("DELETED", at(16, pod("a", deleted=True)))),
        watched(),
    ]
    told: list[list[str]] = []
    pauses: list[float] = []
    pods.follow(lambda found: told.append(uids(found)), lambda pause_s: pauses.append(pause_s) or False)
    assert pauses == [0.5] * 3, "an API that ends watches at once is not asked over and over"
    assert told == [["a"], ["a", "b-"], ["a", "b"], ["a-", "b"], ["b"]]
    paths, queries = zip(*server.asked, strict=True)
    assert set(paths) == {"/api/v1/namespaces/models/pods"}
    assert all(query["labelSelector"] == "app.kubernetes.io/name=kvrelay" for query in queries)
    assert [query.get("resourceVersion") for query in queries] == [None, "10", "14", "16"]
    assert queries[1]["watch"].lower() == "true"


GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


async def test_it_lists_anew_when_the_version_is_gone_and_keeps_what_it_knows_while_the_api_is_away(
    server: Server, pods: Pods, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "_FIRST_PAUSE_S", 0.001)
    caplog.set_level("INFO")
    forbidden: Answer = (403, [{"message": "pods is forbidden"}], False)
    server.answers = [
        *[forbidden, forbidden, listed(10, pod("a")), (410, [GONE], False)],
        *[listed(20, pod("b")), (200, [{"type": "ERROR", "object": GONE}], False)],
        *[listed(30, pod("c")), (500, [], False), (200, [{"items": []}], True)],
        *[(200, [{}], False), listed(40, pod("d"))],
    ]
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    running = Discovery(pods, lambda found: told.put_nowait(uids(found)))
    running.start()
    try:
        assert [await asyncio.wait_for(told.get(), WAIT_S) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]
        assert caplog.text.count("the Kubernetes API is away (403 Forbidden)") == 1  # one line for each outage
        assert caplog.text.count("the Kubernetes API is away") == 2
    finally:
        server.silent.set()
        running.stop()
    assert told.empty()  # an outage removes no worker
    assert caplog.text.count("the version last seen is too old") == 2
    assert "it tries again" in caplog.text


async def test_a_watch_that_hears_nothing_ends_when_discovery_does(
    server: Server, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_STOP_S", 2 * WAIT_S)
    server.answers = [listed(10, pod("a"))]
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    running = Discovery(pods, lambda found: told.put_nowait(uids(found)))
    running.start()
    try:
        assert await asyncio.wait_for(told.get(), WAIT_S) == ["a"]
        assert server.is_watched.wait(WAIT_S)
        running.stop()
    finally:
        server.silent.set()
    assert "discovery" not in [thread.name for thread in threading.enumerate()]


def test_outside_of_a_cluster_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    with pytest.raises(SettingsError, match="--discovery is kubernetes, but this is no pod"):
        Pods.connect(None, "a=b")


# -- pods to workers -----------------------------------------------------------------------------------------------


def test_a_ready_pod_is_a_worker() -> None:
    assert worker_of(pod()) == FoundWorker(Role.DECODE, "tcp://10.0.0.8:7200", "u", accepts=True)
    found = worker_of(pod(role="prefill", ip="fd00::8"))
    assert found == FoundWorker(Role.PREFILL, "tcp://[fd00::8]:7200", "u", accepts=True)


@pytest.mark.parametrize("changes", [{"ready": False}, {"deleted": True}])
def test_a_pod_that_starts_or_leaves_takes_nothing_new(changes: dict[str, Any]) -> None:
    found = worker_of(pod(**changes))
    assert found is not None
    assert not found.accepts


@pytest.mark.parametrize(
    "changes",
    [{"role": None}, {"role": "gateway"}, {"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}, {"ports": []}],
)
def test_other_pods_are_no_workers(changes: dict[str, Any]) -> None:
    assert worker_of(pod(**changes)) is None


def test_a_pod_that_was_just_made_is_no_worker_yet() -> None:
    assert worker_of({"metadata": {"uid": "u", "labels": {"kvrelay.dev/role": "decode"}}, "spec": {}}) is None


@pytest.mark.parametrize("order", [1, -1])
def test_an_address_belongs_to_who_takes_requests_there(order: int) -> None:
    pods = [pod("old", deleted=True), pod("new"), pod("other", ip="10.0.0.9")][::order]
    assert {found.uid for found in workers_of(pods)} == {"new", "other"}


@pytest.mark.parametrize(
    ("name", "nodes", "is_worker"),
    [
        ("r-decode-worker-0", "2", True),
        ("r-decode-worker-1", "2", False),
        ("r-decode-worker-6", "3", True),
        ("r-decode-worker-7", "3", False),
        ("r-decode-worker-6d4f-x2z7q", "2", False),
        ("r-decode-worker-6d4f-12345", "1", True),
        ("r-decode-worker-0", "two", False),
        ("r-decode-worker-0", "0", True),
    ],
)
def test_of_the_pods_of_a_worker_on_several_nodes_only_the_first_is_one(name: str, nodes: str, is_worker: bool) -> None:
    one = pod("u")
    one["metadata"]["name"] = name
    one["metadata"]["labels"]["kvrelay.dev/nodes-per-worker"] = nodes
    assert (worker_of(one) is not None) is is_worker


@pytest.mark.parametrize(("name", "index"), [("r-decode-worker-1", "0"), ("r-decode-worker-1-2", "2")])
def test_of_a_leader_worker_sets_group_the_first_pod_is_the_worker(name: str, index: str) -> None:
    """The label with the pod's index in the group decides, because these pods are not named as a StatefulSet's."""
    one = pod("u")
    one["metadata"]["name"] = name
    one["metadata"]["labels"] |= {
        "kvrelay.dev/nodes-per-worker": "3",
        "leaderworkerset.sigs.k8s.io/worker-index": index,
    }
    assert (worker_of(one) is not None) is (index == "0")
