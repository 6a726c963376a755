"""Values: wrong ones are refused by name, and settings reach the programs."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from .chart import env_of, needs_helm, objects, pod_of, refusal


@needs_helm
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("prefil.replicas=2", "prefil"),
        ("gateway.replica=2", "replica"),
        ("decode.replicas=two", "replicas"),
        ("decode.replicas=-1", "replicas"),
        ("prefill.settings.max_num_seq=4", "max_num_seq"),
        ("prefill.settings.dtype=fp8", "dtype"),
        ("decode.settings.block_size=0", "block_size"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("model.source=s3", "source"),
        ("gateway.service.port=70000", "port"),
        ("networkPolicy.apiServerPorts={70000}", "apiServerPorts"),
        ("prefill.tensorParallel=0", "tensorParallel"),
        ("decode.settings.tensor_parallel=2", "tensor_parallel"),
        ("decode.nodesPerWorker=0", "nodesPerWorker"),
        ("decode.settings.nodes=2", "nodes"),
        ("models.v1.model.nam=x", "nam"),
        ("models.v1.gateway.replicas=1", "gateway"),
        ("models.V1.model.name=x", "V1"),
        ("models.v1.decode.replicas=1", "models.v1.model"),
        ("gateway.settings.decode_workers={tcp://1.2.3.4:7200}", "decode_workers"),
    ],
)
def test_mistakes_are_refused_by_name(mistake: str, says: str) -> None:
    assert says in refusal(mistake)


@needs_helm
def test_settings_reach_the_program_as_they_are() -> None:
    found = objects(
        "--set-json", 'decode.settings={"max_num_seqs": 1000000, "lease_ttl_s": 2.5, "seal_kv": true}',
        "--set", "gateway.settings.policy=least_loaded,model.servedName=small",
    )  # fmt: skip
    decode, gateway = env_of(pod_of(found, "decode-worker")), env_of(pod_of(found, "gateway"))
    assert decode["KVRELAY_MAX_NUM_SEQS"] == "1000000"
    assert (decode["KVRELAY_LEASE_TTL_S"], decode["KVRELAY_SEAL_KV"]) == ("2.5", "true")
    assert (gateway["KVRELAY_POLICY"], gateway["KVRELAY_SERVED_MODEL_NAME"]) == ("least_loaded", "small")
    selector = "app.kubernetes.io/name=kvrelay,app.kubernetes.io/instance=relay"
    assert gateway["KVRELAY_WORKER_SELECTOR"] == selector
    labels = found["Deployment", "relay-kvrelay-decode-worker"]["spec"]["template"]["metadata"]["labels"]
    assert all(labels[key] == value for key, value in (part.split("=") for part in selector.split(",")))
    assert labels["kvrelay.dev/role"] == "decode"


@needs_helm
def test_a_setting_takes_the_place_of_the_charts_own() -> None:
    """Kubernetes merges variables by name: of two with one name, an upgrade that takes one away takes both."""
    settings = ",".join(f"{of}.settings.log_format=text" for of in ("gateway", "prefill", "decode"))
    for component in ("gateway", "prefill-worker", "decode-worker"):
        variables = pod_of(objects("--set", settings), component)["containers"][0]["env"]
        assert [one["value"] for one in variables if one["name"] == "KVRELAY_LOG_FORMAT"] == ["text"]


@needs_helm
def test_a_drain_fits_into_the_grace_period() -> None:
    found = objects("--set-json", 'decode.settings={"drain_s": 120.5}')
    assert pod_of(found, "decode-worker")["terminationGracePeriodSeconds"] == 121 + 15
    assert pod_of(found, "prefill-worker")["terminationGracePeriodSeconds"] == 30 + 15
    assert pod_of(found, "gateway")["terminationGracePeriodSeconds"] == 30 + 5 + 15


class Answering(http.server.BaseHTTPRequestHandler):
    """A gateway that streams ``deltas`` to everybody."""

    deltas: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for delta in self.deltas:
            self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@needs_helm
@pytest.mark.parametrize(
    ("deltas", "printed"),
    [
        ([{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}], "Hello\n"),
        ([{"role": "assistant", "content": ""}, {"reasoning_content": "The user"}], "The user\n"),
        ([{"role": "assistant", "content": ""}], None),
    ],
    ids=["text", "only thoughts", "nothing"],
)
def test_the_test_request_wants_some_output(deltas: list[dict[str, str]], printed: str | None) -> None:
    """The script of `helm test`, against a server. A model that reasons may have only thoughts to show for so few tokens."""
    (container,) = objects()["Pod", "relay-kvrelay-test-completion"]["spec"]["containers"]
    handler = type("Handler", (Answering,), {"deltas": deltas})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        script = container["args"][0].replace("relay-kvrelay-gateway:80", f"127.0.0.1:{server.server_port}")
        ended = subprocess.run(
            [sys.executable, "-c", script], env={}, capture_output=True, text=True, check=False, timeout=60
        )
        server.shutdown()
        thread.join()
    assert (ended.stdout if ended.returncode == 0 else None) == printed, ended.stderr
