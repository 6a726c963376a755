"""The values in the chart's examples: the rendered objects, and their check by lint and by Kubernetes' schemas."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from .chart import CHART, MONITORING, env_of, helm, needs_helm, objects, pod_of, rendered

EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
VERSIONS = (
    "1.28",
    "1.37",
)  # the oldest and the newest version with schemas: few fields exist for only the ten between
CUSTOM = {
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}  # kinds of other projects, which have schemas of their own
_MADE = re.compile(r"^(  (?:gateway|prefill|decode)\.(?:key|pem)|  key|  api-keys): \S+$", re.MULTILINE)


@functools.cache
def problem_of(document: str, version: str) -> str | None:
    """The schema error of a document, or None. Cached, as examples share most of their objects."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


@needs_helm
def test_the_defaults_render_as_they_did() -> None:
    """To accept a change, run KVRELAY_WRITE_GOLDEN=1 pytest tests/helm, and review the difference."""
    text = _MADE.sub(
        r"\1: (made at the first install)", rendered("--set", "metrics.dashboard.enabled=false", *MONITORING)
    )
    golden = Path(__file__).parent / "golden/defaults.yaml"
    if os.environ.get("KVRELAY_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@needs_helm
def test_pods_run_where_the_values_say_with_what_they_say() -> None:
    example = CHART / "examples/8-gpu-nodes.yaml"
    values, found = yaml.safe_load(example.read_text()), objects("--values", str(example))
    for component in ("gateway", "prefill-worker", "decode-worker"):
        given, pod = values[component.removesuffix("-worker")], pod_of(found, component)
        assert found["Deployment", f"relay-kvrelay-{component}"]["spec"]["replicas"] == given["replicas"]
        for name in given.keys() & {"nodeSelector", "tolerations", "topologySpreadConstraints"}:
            assert pod[name] == given[name]
        (container,) = pod["containers"]
        assert given["resources"]["requests"].items() <= container["resources"]["requests"].items()
        token = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
        assert {"name": "HF_TOKEN", "valueFrom": token} in container["env"]
        assert {"claimName": "models"} in [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
    pod = pod_of(objects("--values", str(CHART / "examples/several-nodes.yaml")), "prefill-worker")
    assert {"medium": "Memory", "sizeLimit": "16Gi"} in [volume.get("emptyDir") for volume in pod["volumes"]]


@needs_helm
def test_a_strict_cluster_pulls_by_digest_reads_a_volume_and_lets_in_whom_it_names() -> None:
    found = objects("--values", str(CHART / "examples/locked-down.yaml"))
    for component, image, digit in (
        ("gateway", "gateway", 1),
        ("prefill-worker", "worker", 2),
        ("decode-worker", "worker", 2),
    ):
        pod = pod_of(found, component)
        (container,) = pod["containers"]
        assert container["image"] == f"registry.example.com/llm/kvrelay-{image}@sha256:{digit:064}"
        assert (pod["imagePullSecrets"], pod["priorityClassName"]) == ([{"name": "registry"}], "serving")
        assert (env_of(pod)["KVRELAY_MODEL"], env_of(pod)["HF_HUB_OFFLINE"]) == ("/model/Qwen3-8B", "1")
        assert {"name": "model", "mountPath": "/model", "readOnly": True} in container["volumeMounts"]
        claim = {"claimName": "models", "readOnly": True}
        assert {"name": "model", "persistentVolumeClaim": claim} in pod["volumes"]
        policy = found["NetworkPolicy", f"relay-kvrelay-{component}"]["spec"]
        port = "http" if component == "gateway" else "admin"
        callers = [peer for rule in policy["ingress"] for peer in rule["from"] if port in str(rule["ports"])]
        labels = [peer.get("namespaceSelector", {}).get("matchLabels") for peer in callers]
        assert {"kubernetes.io/metadata.name": "monitoring"} in labels
        assert ({"kubernetes.io/metadata.name": "apps"} in labels) is (component == "gateway")
        assert {"podSelector": {}} not in callers
        # Workers download nothing.
        assert "443" not in str(policy["egress"]) or component == "gateway"
    probe = found["Pod", "relay-kvrelay-test-completion"]["spec"]
    (container,) = probe["containers"]
    assert probe["imagePullSecrets"] == [{"name": "registry"}]
    secret = {"name": "kvrelay-api-keys", "key": "key", "optional": True}
    assert container["env"] == [{"name": "API_KEY", "valueFrom": {"secretKeyRef": secret}}]
    assert container["image"].endswith(f"@sha256:{1:064}")
    assert env_of(pod_of(found, "gateway"))["KVRELAY_API_KEYS"] == "/api-keys/api-keys"


@needs_helm
def test_the_chart_passes_lint() -> None:
    """The linted values turn on autoscaling; other tests render every example."""
    ended = helm("lint", "--strict", str(CHART), "--values", str(CHART / "examples/autoscaled.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_kubernetes_takes(example: Path) -> None:
    """The strict schemas of the oldest and the newest version, in which an unknown field is an error."""
    everything = (
        "--set",
        "gateway.ingress.enabled=true,gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=g",
    )
    for (kind, name), document in objects("--values", str(example), *MONITORING, *everything).items():
        if kind in CUSTOM:
            continue
        for version in VERSIONS:
            problem = problem_of(json.dumps(document), version)
            assert problem is None, f"{kind} {name} against {version}: {problem}"


@needs_helm
def test_a_route_does_not_cut_long_answers_off() -> None:
    """Without time-outs of its own, a route gets the Gateway's, which may be 15 seconds."""
    found = objects("--set", "gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=g")
    (rule,) = found["HTTPRoute", "relay-kvrelay-gateway"]["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "relay-kvrelay-gateway", "port": 80}]
