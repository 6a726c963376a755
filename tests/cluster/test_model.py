"""The demo model on a cluster: tokens equal transformers', permissions are minimal, and an uninstall leaves nothing
behind."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvrelay.launcher.cli import run

from .cluster import MODEL, Cluster, Release, wait_for
from .conftest import release_of
from .load import Load, assert_same_answers, failures, summary

COMPONENTS = ("gateway", "prefill-worker", "decode-worker")

# Sends each (verb, path) to the Kubernetes API with the pod's token, and prints the status codes.
TRY_API = """
import json, ssl, sys, urllib.error, urllib.request
where = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(f"{where}/token").read()
context = ssl.create_default_context(cafile=f"{where}/ca.crt")
answers = {}
for verb, path in json.loads(sys.argv[1]):
    body = b"{}" if verb in ("POST", "PATCH") else None
    kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    request = urllib.request.Request(f"https://kubernetes.default.svc{path}", body, headers, method=verb)
    try:
        answers[f"{verb} {path}"] = urllib.request.urlopen(request, context=context, timeout=10).status
    except urllib.error.HTTPError as error:
        answers[f"{verb} {path}"] = error.code
print(json.dumps(answers))
"""

# Counts the processes of a pod that are ranks besides the leader.
COUNT_RANKS = """
from pathlib import Path
lines = [path.read_bytes().split(b"\\0") for path in Path("/proc").glob("[0-9]*/cmdline")]
print(sum(b"kvrelay.engine.rank_main" in line for line in lines))
"""

# Connects to workers as a gateway from outside the release, with and without keys of its own. Prints whether a worker
# answers.
STRANGER = """
import sys, tempfile, pathlib, zmq
from kvrelay.wire.codec import Codec
from kvrelay.wire.security.keys import WireKeys, make_keys
from kvrelay.wire.security.authentication import ClientProof
from kvrelay.wire.messages import Hello, Role, Ping
directory = pathlib.Path(tempfile.mkdtemp())
make_keys(directory)
for role in ("decode", "prefill"):
    (directory / f"{role}.pem").write_bytes(pathlib.Path(f"/keys/{role}.pem").read_bytes())
for address, role in zip(sys.argv[1:], (Role.PREFILL, Role.DECODE), strict=True):
    for proof in (None, ClientProof(WireKeys.load(directory, Role.GATEWAY), role)):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, b"stranger")
        if proof is not None:
            proof.guard(socket)
        socket.connect(address)
        for message in (Hello(role=Role.GATEWAY, peer_id="stranger"), Ping()):
            try:
                socket.send(Codec().encode(message), zmq.DONTWAIT)
            except zmq.Again:
                pass
        print("an answer" if socket.poll(2000) else "nothing")
"""


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release with two gateways, two prefill and two decode workers, API keys, and a hand-off of every prompt."""
    worker = {"settings": {"dtype": "float32", "kv_memory_mb": 256}}
    values = {
        "gateway": {"settings": {"local_prefill": "fallback"}},
        "prefill": worker,
        "decode": worker,
        "security": {"apiKeys": {"enabled": True}},
    }
    yield from release_of(cluster, "kvrelay-model", values)


@pytest.fixture(scope="module")
def url(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A local URL of the gateway's Service, by port-forward to a port that kubectl chooses."""
    command = ["kubectl", "port-forward", "-n", release.namespace, "service/relay-kvrelay-gateway", ":80"]
    said = tmp_path_factory.mktemp("forward") / "said"

    def found() -> str | None:
        port = re.search(r"127\.0\.0\.1:(\d+)", said.read_text())
        return None if port is None else f"http://127.0.0.1:{port[1]}"

    def answers() -> bool:
        try:
            return httpx.get(f"{found()}/health/live").is_success
        except httpx.HTTPError:
            return False

    with said.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as forward:
        try:
            wait_for("the port-forward", lambda: found() is not None and answers(), 30)
            yield str(found())
        finally:
            forward.terminate()


@pytest.fixture(scope="module")
def key(release: Release) -> str:
    """The API key that the chart generated."""
    name = "--field-selector=metadata.name=relay-kvrelay-api-keys"
    (secret,) = release.cluster.get("secrets", "-n", release.namespace, name)
    return base64.b64decode(secret["data"]["key"]).decode()


def test_tokens_equal_those_of_transformers(
    release: Release, url: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kvrelay verify`` passes against the deployment, and its prompts were handed over and verified."""
    assert run(["verify", "--url", url, "--api-key", key, "--max-tokens", "8", "--threads", "2"]) == 0
    assert "all 40 answers equal transformers" in capsys.readouterr().out
    verified = 0.0
    for pod in release.ready("prefill-worker"):
        lines = release.metrics(pod, 7180).splitlines()
        verified += sum(float(line.split()[-1]) for line in lines if 'handoffs_total{outcome="verified"}' in line)
    assert verified >= 40


def test_one_pool_gets_several_ranks_while_the_other_serves(release: Release, nodes: list[str], key: str) -> None:
    """Decode workers are upgraded to three ranks under load. No request fails, and answers stay equal. Prefill workers
    keep one rank."""
    before = {pod["metadata"]["uid"] for pod in release.pods("prefill-worker")}
    with Load(release, node=nodes[0], num_streams=3, max_tokens=16, api_key=key) as load:
        with load.watched() as results:
            release.upgrade({"decode": {"tensorParallel": 3}})
        print(summary("decode workers get three ranks", results))
        assert failures(results) == []
        assert_same_answers(load.results())
    assert {pod["metadata"]["uid"] for pod in release.pods("prefill-worker")} == before
    for pod in release.ready("decode-worker"):
        assert release.execute(pod["metadata"]["name"], "python", "-c", COUNT_RANKS) == "2\n"


def test_idle_workers_compute_what_they_computed_at_first(release: Release) -> None:
    """The canary of every worker, of one rank or of three, reports "same" at least twice, and nothing else."""

    def outcomes(pod: dict[str, Any], port: int) -> dict[str, float]:
        lines = [line for line in release.metrics(pod, port).splitlines() if line.startswith("kvrelay_canaries_total{")]
        counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
        return {outcome: count for outcome, count in counts.items() if count}

    for component, port in (("prefill-worker", 7180), ("decode-worker", 7280)):
        for pod in release.ready(component):
            wait_for("two answers of a canary", lambda pod=pod, port=port: outcomes(pod, port).get("same", 0) >= 2)
            assert set(outcomes(pod, port)) == {"same"}
            assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]


def test_a_stream_through_the_service(url: str, key: str) -> None:
    """The openai client gets the same text streamed and whole."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=question, max_tokens=24, temperature=0)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=question, max_tokens=24, temperature=0, stream=True
    )
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text


def test_without_a_key_nobody_is_served(url: str, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer kvr-guessed"}):
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"


def test_helm_test_sends_a_request(release: Release) -> None:
    release.cluster.helm("test", "relay", "-n", release.namespace)


def test_pods_are_spread_and_closed(release: Release, nodes: list[str]) -> None:
    """The pods of a component are on two nodes. They run without root on a read-only file system, and only gateways
    have an API token."""
    for component in COMPONENTS:
        pods = release.ready(component)
        assert len(pods) == 2, _states(release)
        if len(nodes) > 1:
            assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
        name = pods[0]["metadata"]["name"]
        script = (
            "id -u; touch /here 2>&1; touch /usr/local/here 2>&1; touch /tmp/here && echo tmp; "
            "ls /var/run/secrets/kubernetes.io/serviceaccount/token 2>&1; which gcc g++ cc"
        )
        said = release.execute(name, "sh", "-c", script, is_checked=False)
        assert said.startswith("10001\n")
        assert said.count("Read-only file system") == 2
        assert "\ntmp\n" in said
        assert ("No such file" in said) is (component != "gateway")
        assert "bin/gcc" not in said
        assert "bin/cc" not in said


def test_the_gateway_may_watch_its_pods_and_nothing_else(release: Release) -> None:
    """The requests are sent with the gateway pod's own token."""
    here = f"/api/v1/namespaces/{release.namespace}"
    pod = release.ready("gateway")[0]["metadata"]["name"]
    other = release.ready("decode-worker")[0]["metadata"]["name"]
    allowed = [
        ("GET", f"{here}/pods"),
        ("GET", f"{here}/pods/{other}"),
        ("GET", f"{here}/pods?watch=1&timeoutSeconds=1"),
    ]
    forbidden = [
        ("DELETE", f"{here}/pods/{other}"),
        ("PATCH", f"{here}/pods/{other}"),
        ("POST", f"{here}/pods"),
        ("GET", f"{here}/pods/{other}/log"),
        ("GET", f"{here}/secrets"),
        ("GET", f"{here}/secrets/relay-kvrelay-keys"),
        ("GET", f"{here}/configmaps"),
        ("GET", f"{here}/services"),
        ("POST", f"{here}/events"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/apis/apps/v1/deployments"),
        ("GET", f"/apis/apps/v1/namespaces/{release.namespace}/deployments"),
    ]
    tried = json.dumps([*allowed, *forbidden])
    answers = json.loads(release.execute(pod, "python", "-c", TRY_API, tried))
    assert [answers[f"{verb} {path}"] for verb, path in allowed] == [200] * len(allowed)
    assert {path: answers[path] for path in answers if answers[path] != 403} == {
        f"{verb} {path}": 200 for verb, path in allowed
    }


def test_a_stranger_in_the_cluster_gets_nothing(release: Release) -> None:
    """A pod outside the release has the workers' public keys. No worker answers it, without a key or with a key pair of
    its own."""
    workers = [release.ready("prefill-worker")[0], release.ready("decode-worker")[0]]
    addresses = [
        f"tcp://{pod['status']['podIP']}:{port['containerPort']}"
        for pod in workers
        for port in pod["spec"]["containers"][0]["ports"]
        if port["name"] == "control"
    ]
    (secret,) = release.cluster.get(
        "secrets", "-n", release.namespace, "--field-selector=metadata.name=relay-kvrelay-keys"
    )
    public = {name: base64.b64decode(text).decode() for name, text in secret["data"].items() if name.endswith(".pem")}
    kubectl, tag = release.cluster.kubectl, release.cluster.tag
    with release.cluster.namespace("kvrelay-stranger") as namespace:
        objects = [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "public"}, "data": public},
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "stranger"},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "stranger",
                            "image": f"kvrelay-gateway:{tag}",
                            "command": ["python", "-c", STRANGER, *addresses],
                            "volumeMounts": [{"name": "public", "mountPath": "/keys"}],
                        }
                    ],
                    "volumes": [{"name": "public", "configMap": {"name": "public"}}],
                },
            },
        ]
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        kubectl("apply", "-n", namespace, "-f", "-", text=json.dumps(listed))

        def phase() -> str:
            pods = release.cluster.pods(namespace)
            return next(
                (pod["status"]["phase"] for pod in pods if pod["status"]["phase"] in ("Succeeded", "Failed")), ""
            )

        ended = wait_for("the stranger to give up", phase, 60)
        said = kubectl("logs", "-n", namespace, "stranger")
        assert (ended, said.split("\n")[:-1]) == ("Succeeded", ["nothing"] * 4)
    for pod, port in zip(workers, (7180, 7280), strict=True):
        (line,) = [
            line for line in release.metrics(pod, port).splitlines() if line.startswith("kvrelay_refused_keys_total")
        ]
        assert float(line.split()[-1]) >= 1


def _states(release: Release) -> dict[str, Any]:
    return {pod["metadata"]["name"]: pod["status"] for pod in release.pods()}


def test_keys_stay_on_upgrades_and_nothing_stays_behind(release: Release) -> None:
    """This test is the last one of the module, because it uninstalls the release."""
    namespace = ("-n", release.namespace)

    def keys() -> dict[str, str]:
        secrets = release.cluster.get("secrets", *namespace, "-l", "app.kubernetes.io/instance=relay")
        return {secret["metadata"]["name"]: json.dumps(secret["data"]) for secret in secrets}

    before = keys()
    assert set(before) == {"relay-kvrelay-keys", "relay-kvrelay-api-keys"}
    release.upgrade({"metrics": {"dashboard": {"enabled": False}}})
    assert keys() == before
    release.uninstall()
    kinds = release.cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
    left = release.cluster.kubectl(
        "get", ",".join(kinds), *namespace, "-l", "app.kubernetes.io/instance=relay", "-o", "name", "--ignore-not-found"
    )
    assert [line for line in left.splitlines() if "endpoint" not in line.lower()] == []
