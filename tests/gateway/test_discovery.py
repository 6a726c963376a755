"""Following pods: over a scripted API, and with the real client against a server of ours."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client, config

from kvrelay.common.errors import SettingsError
from kvrelay.gateway import discovery
from kvrelay.gateway.discovery import ApiAwayError, Discovery, KubernetesPods, VersionGoneError, follow
from kvrelay.gateway.workers import FoundWorker

from .test_pods import pod

WAIT_S = 10.0

Event = tuple[str, dict[str, Any]]
Step = Callable[[], Iterator[Event]] | Sequence[Event] | Exception


def at(version: int, of: dict[str, Any]) -> dict[str, Any]:
    of["metadata"]["resourceVersion"] = str(version)
    return of


class Api:
    """Plays one entry of each list per call; then the calls wait until the test is over."""

    def __init__(self, lists: Sequence[tuple[list[dict[str, Any]], str] | Exception], watches: Sequence[Step]) -> None:
        self._lists, self._watches = iter(lists), iter(watches)
        self.versions: list[str] = []
        self.over = threading.Event()

    def list(self) -> tuple[list[dict[str, Any]], str]:
        answer = next(self._lists, None)
        if answer is None:
            self.over.wait(WAIT_S)
            raise ApiAwayError("the test is over")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def watch(self, version: str) -> Iterator[Event]:
        self.versions.append(version)
        step = next(self._watches, ())
        if isinstance(step, Exception):
            raise step
        yield from step() if callable(step) else step

    def stop(self) -> None:
        self.over.set()


def uids(found: Sequence[FoundWorker]) -> list[str]:
    return [f"{worker.uid}{'' if worker.accepts else '-'}" for worker in found]


def test_every_change_is_told_once_and_the_watch_goes_on_where_it_ended() -> None:
    told: list[list[str]] = []
    first, second = pod("a"), pod("b", ip="10.0.0.9")
    events: list[Event] = [
        ("ADDED", at(11, pod("b", ip="10.0.0.9", ready=False))),
        ("MODIFIED", at(12, second)),
        ("BOOKMARK", {"metadata": {"resourceVersion": "13"}}),
        ("MODIFIED", at(14, pod("b", ip="10.0.0.9"))),  # nothing that matters
    ]
    leaving: list[Event] = [("MODIFIED", at(15, pod("a", deleted=True))), ("DELETED", at(16, pod("a", deleted=True)))]
    api = Api([([first], "10")], [events, leaving])
    pauses: list[float] = []
    follow(api, lambda found: told.append(uids(found)), lambda pause_s: pauses.append(pause_s) or False)
    assert pauses == [0.5] * 3, "an API that ends watches at once is not asked over and over"
    assert told == [["a"], ["a", "b-"], ["a", "b"], ["a-", "b"], ["b"]]
    assert api.versions == ["10", "14", "16"]


def test_it_lists_anew_when_the_version_is_gone_and_keeps_what_it_knows_while_the_api_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "_FIRST_PAUSE_S", 0.001)
    away = ApiAwayError("connection refused")
    api = Api(
        [away, away, ([pod("a")], "10"), away, ([pod("b")], "20"), RuntimeError("a bug"), ([pod("c")], "30")],
        [VersionGoneError("too old"), away],
    )
    told: queue.Queue[list[str]] = queue.Queue()
    running = Discovery(api, lambda found: told.put(uids(found)))
    running.start()
    try:
        assert [told.get(timeout=WAIT_S) for _ in range(3)] == [["a"], ["b"], ["c"]]
    finally:
        running.stop()
    assert told.empty()  # nothing was ever taken back
    text = caplog.text
    assert text.count("the Kubernetes API is away (connection refused)") == 3  # once each time, not once a try
    assert "it tries again" in text


class _Kubernetes(BaseHTTPRequestHandler):
    """Answers lists and watches from ``server.answers``, in order; remembers the queries."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        self.server.asked.append((path.path, {key: value[0] for key, value in parse_qs(path.query).items()}))
        if not self.server.answers:  # says nothing until the test is over
            self.server.is_watched.set()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.server.silent.wait(WAIT_S)
            self.close_connection = True
            return
        status, lines, cut = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = json.dumps(line).encode() + b"\n"
            for part in (data[:7], data[7:]):  # lines and chunks are not the same
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if not cut:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    asked: list[tuple[str, dict[str, str]]]
    answers: list[tuple[int, list[dict[str, Any]], bool]]
    silent: threading.Event  # what is unanswered stays so until it is set
    is_watched: threading.Event  # somebody is unanswered


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
def pods(server: Server) -> Iterator[KubernetesPods]:
    with client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}")) as api:
        yield KubernetesPods(client.CoreV1Api(api), "models", "app.kubernetes.io/name=kvrelay")


def test_the_real_client_lists_and_watches(server: Server, pods: KubernetesPods) -> None:
    server.answers = [
        (200, [{"items": [pod("a")], "metadata": {"resourceVersion": "10"}}], False),
        (200, [{"type": "ADDED", "object": at(11, pod("b", ip="10.0.0.9"))}], False),
        (200, [], False),
    ]
    told: list[list[str]] = []
    follow(pods, lambda found: told.append(uids(found)), lambda _: False)
    assert told == [["a"], ["a", "b"]]
    paths, queries = zip(*server.asked, strict=True)
    assert set(paths) == {"/api/v1/namespaces/models/pods"}
    assert all(query["labelSelector"] == "app.kubernetes.io/name=kvrelay" for query in queries)
    assert [query.get("resourceVersion") for query in queries] == [None, "10", "11"]
    assert queries[1]["watch"].lower() == "true"


@pytest.mark.parametrize("in_stream", [True, False])
def test_the_real_client_notices_a_version_that_is_gone(server: Server, pods: KubernetesPods, in_stream: bool) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    server.answers = [(200, [{"type": "ERROR", "object": gone}], False) if in_stream else (410, [gone], False)]
    with pytest.raises(VersionGoneError):
        list(pods.watch("1"))


@pytest.mark.parametrize(
    "answer", [(403, [{"message": "pods is forbidden"}], False), (500, [], False), (200, [{"type": "ADDED"}], True)]
)
def test_the_real_client_notices_that_the_api_is_away(
    server: Server, pods: KubernetesPods, answer: tuple[int, list[dict[str, Any]], bool]
) -> None:
    server.answers = [answer]
    with pytest.raises(ApiAwayError):
        pods.list()
    server.shutdown()
    server.server_close()
    with pytest.raises(ApiAwayError):
        list(pods.watch("1"))


def test_a_watch_that_hears_nothing_ends_when_discovery_does(server: Server, pods: KubernetesPods) -> None:
    server.answers = [(200, [{"items": [pod("a")], "metadata": {"resourceVersion": "10"}}], False)]
    told: queue.Queue[list[str]] = queue.Queue()
    running = Discovery(pods, lambda found: told.put(uids(found)))
    running.start()
    try:
        assert told.get(timeout=WAIT_S) == ["a"]
        assert server.is_watched.wait(WAIT_S)
        running.stop()
    finally:
        server.silent.set()
    assert "discovery" not in [thread.name for thread in threading.enumerate()]


def test_outside_of_a_cluster_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    with pytest.raises(SettingsError, match="--discovery is kubernetes, but this is no pod"):
        KubernetesPods.connect(None, "a=b")
