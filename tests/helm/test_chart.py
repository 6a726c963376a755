"""The chart without a cluster: what it renders, what it refuses, and that what is generated has not drifted. Most needs `helm`."""

from __future__ import annotations

import base64
import difflib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvrelay.common.settings import build
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.ranks.nodes import place_of
from kvrelay.engine.settings import NodeSettings, sequences_at_a_time
from kvrelay.gateway.http.api_keys import ApiKeys
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys
from kvrelay.worker.metrics import EngineMetrics

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
STORED = ("defaults", "locked-down", "8-gpu-nodes", "several-models", "several-nodes")
MONITORING = ("--api-versions", "monitoring.coreos.com/v1")
VERSIONS = (
    "1.28",
    "1.37",
)  # the oldest and the newest that there are schemas of: fields come and go, few stay for ten versions
CUSTOM = {
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}  # their schemas are their projects'
_MADE = re.compile(r"^(  (?:gateway|prefill|decode)\.(?:key|pem)|  key|  api-keys): \S+$", re.MULTILINE)

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")

Manifest = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered(*arguments: str) -> str:
    ended = helm("template", "relay", str(CHART), "--namespace", "models", "--kube-version", "1.32.0", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@functools.cache
def objects(*arguments: str) -> dict[tuple[str, str], Manifest]:
    """By kind and name. Rendered once for all tests."""
    documents = [document for document in yaml.safe_load_all(rendered(*arguments)) if document]
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents), "two objects of one kind and name"
    return found


def pod_of(found: dict[tuple[str, str], Manifest], component: str) -> Manifest:
    spec: Manifest = found["Deployment", f"relay-kvrelay-{component}"]["spec"]["template"]["spec"]
    return spec


def env_of(pod: Manifest) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}


@functools.cache
def problem_of(document: str, version: str) -> str | None:
    """What Kubernetes would not take; examples share most of their objects."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


def documents(text: str) -> list[tuple[str, str]]:
    """Each with the template and the kind that it begins with."""
    return [(part.partition("\nmetadata:")[0], part) for part in re.split(r"^---\n", text, flags=re.MULTILINE)]


def difference(text: str, other: str) -> str:
    """What each document of ``text`` has otherwise than that of the same template and kind in ``other``. Where does not matter."""
    known, lines = dict(documents(other)), []
    for head, document in documents(text):
        if (beside := known.get(head, "")) != document:
            changes = difflib.unified_diff(beside.splitlines(), document.splitlines(), n=0, lineterm="")
            lines += [f"=== {head.splitlines()[0]}"]
            lines += ["@@" if line.startswith("@@") else line for line in list(changes)[2:]]
    lacking = known.keys() - dict(documents(text)).keys()
    return "\n".join([*lines, *(f"=== none of {head.splitlines()[0]}" for head in sorted(lacking))]) + "\n"


@needs_helm
@pytest.mark.parametrize(
    ("resource", "tag", "worker"),
    [("nvidia.com/gpu", "", "9.8.7"), ("", "", "9.8.7-cpu"), ("", "mine", "mine"), ("nvidia.com/gpu", "mine", "mine")],
)
def test_workers_without_a_gpu_run_the_image_for_cpus(tmp_path: Path, resource: str, tag: str, worker: str) -> None:
    """As tools/images.sh names them; a tag that is set is taken as it is."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"^appVersion: .*$", 'appVersion: "9.8.7"', text, flags=re.MULTILINE))
    ended = helm(
        "template", "x", str(chart), "--set", f"image.tag={tag},image.registry=r,decode.gpu.resource={resource}"
    )
    images = re.findall(r"image: (\S+)", ended.stdout)
    assert set(images) == {
        f"r/kvrelay-gateway:{tag or '9.8.7'}",
        f"r/kvrelay-worker:{worker}",
        f"r/kvrelay-worker:{tag or '9.8.7'}",
    }


@needs_helm
@pytest.mark.parametrize("example", STORED)
def test_examples_render_as_they_did(example: str) -> None:
    """After a change that is meant: KVRELAY_WRITE_GOLDEN=1 pytest tests/helm, and a look at the difference."""

    def text_of(name: str) -> str:
        arguments = ("--values", str(CHART / f"examples/{name}.yaml"), "--set", "metrics.dashboard.enabled=false")
        return _MADE.sub(r"\1: (made at the first install)", rendered(*arguments, *MONITORING))

    text = text_of(example)
    if example != "defaults":
        text = difference(text, text_of("defaults"))
    golden = GOLDEN / (f"{example}.yaml" if example == "defaults" else f"{example}.diff")
    if os.environ.get("KVRELAY_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@needs_helm
def test_the_chart_passes_lint() -> None:
    """With everything that an example turns on; that each is rendered is another test."""
    ended = helm("lint", "--strict", str(CHART), "--values", str(CHART / "examples/autoscaled.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_kubernetes_takes(example: Path) -> None:
    """By the strict schemas of every version: an unknown field is an error."""
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
def test_keys_that_the_chart_makes_are_keys(tmp_path: Path) -> None:
    """A pair for each role, in the form that the programs read; new ones for each release."""
    found = [objects(*again)["Secret", "relay-kvrelay-keys"]["data"] for again in ((), ("--set", ""))]
    assert found[0]["decode.key"] != found[1]["decode.key"]
    for name, text in found[0].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    for role in Role:
        keys = WireKeys.load(tmp_path, role)
        assert keys.role_of(keys.public) is role


@needs_helm
@pytest.mark.parametrize("component", ["gateway", "prefill-worker", "decode-worker"])
def test_a_pod_sees_its_own_private_key_only(component: str) -> None:
    (volume,) = [volume for volume in pod_of(objects(), component)["volumes"] if volume["name"] == "keys"]
    private = [item["key"] for item in volume["secret"]["items"] if item["key"].endswith(".key")]
    assert private == [f"{component.removesuffix('-worker')}.key"]


@needs_helm
def test_an_existing_secret_is_used_and_none_is_made() -> None:
    found = objects("--values", str(CHART / "examples/locked-down.yaml"))
    assert [key for key in found if key[0] == "Secret"] == []
    volumes = {volume["name"]: volume for volume in pod_of(found, "gateway")["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "kvrelay-keys"
    assert volumes["api-keys"]["secret"]["secretName"] == "kvrelay-api-keys"


@needs_helm
def test_without_keys_workers_are_told_that_this_is_meant() -> None:
    found = objects("--set", "security.keys.enabled=false")
    for component in ("prefill-worker", "decode-worker"):
        environment = env_of(pod_of(found, component))
        assert environment["KVRELAY_INSECURE"] == "true"
        assert "KVRELAY_KEYS" not in environment


@needs_helm
def test_with_a_certificate_everything_that_asks_the_gateway_asks_by_https() -> None:
    """Probes, Service, Ingress, Prometheus, `helm test`; and the Secret is mounted, where the program looks for it."""
    arguments = ("--set", "gateway.tls.secretName=cert,gateway.ingress.enabled=true", *MONITORING)
    found = objects(*arguments)
    pod = pod_of(found, "gateway")
    (container,) = pod["containers"]
    assert [container[f"{probe}Probe"]["httpGet"]["scheme"] for probe in ("startup", "readiness", "liveness")] == [
        "HTTPS"
    ] * 3
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    assert volume["secret"]["secretName"] == "cert"
    assert mount["readOnly"] is True
    files = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert files == {env_of(pod)["KVRELAY_TLS_CERT"], env_of(pod)["KVRELAY_TLS_KEY"]}
    (port,) = found["Service", "relay-kvrelay-gateway"]["spec"]["ports"]
    (rule,) = found["Ingress", "relay-kvrelay-gateway"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["port"]["name"] == port["name"] == "https"
    assert found["PodMonitor", "relay-kvrelay-gateway"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    assert "scheme" not in found["PodMonitor", "relay-kvrelay-decode-worker"]["spec"]["podMetricsEndpoints"][0]
    assert (
        "https://relay-kvrelay-gateway:80/"
        in found["Pod", "relay-kvrelay-test-completion"]["spec"]["containers"][0]["args"][0]
    )
    plain = objects(*MONITORING)
    assert plain["Service", "relay-kvrelay-gateway"]["spec"]["ports"][0]["name"] == "http"
    assert "KVRELAY_TLS_CERT" not in env_of(pod_of(plain, "gateway"))
    assert "scheme" not in pod_of(plain, "gateway")["containers"][0]["readinessProbe"]["httpGet"]
    assert "scheme" not in plain["PodMonitor", "relay-kvrelay-gateway"]["spec"]["podMetricsEndpoints"][0]


@needs_helm
def test_the_api_key_that_the_chart_makes_is_known_to_the_gateway(tmp_path: Path) -> None:
    data = objects("--set", "security.apiKeys.enabled=true")["Secret", "relay-kvrelay-api-keys"]["data"]
    (tmp_path / "keys").write_bytes(base64.b64decode(data["api-keys"]))
    assert (
        ApiKeys(tmp_path / "keys", lambda: 0.0).check("Bearer " + base64.b64decode(data["key"]).decode()) == "default"
    )


@needs_helm
def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    """Every name in an expression is one that a gateway or a worker has."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    EngineMetrics(registry, BlockManager(4, 4, lambda: 0.0), num_running=lambda: 0, num_waiting=lambda: 0)
    known = {sample.name for family in registry.collect() for sample in family.samples}
    known |= {
        name for family in registry.collect() for name in (family.name, f"{family.name}_total", f"{family.name}_sum")
    }
    known |= {f"{family.name}_{part}" for family in registry.collect() for part in ("bucket", "count")}
    # Made by the prefill worker itself; its own test reads them.
    known |= {"kvrelay_waiting_prompt_tokens", "kvrelay_longest_wait_seconds"}
    found = objects(*MONITORING)
    rules = found["PrometheusRule", "relay-kvrelay"]["spec"]["groups"][0]["rules"]
    dashboard = json.loads(found["ConfigMap", "relay-kvrelay-dashboard"]["data"]["kvrelay.json"])
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"kvrelay_[a-z0-9_]+", expression)}
    scaled = objects("--values", str(CHART / "examples/autoscaled.yaml"))
    names |= {
        metric["pods"]["metric"]["name"]
        for metric in scaled["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]["metrics"]
    }
    triggers = scaled["ScaledObject", "relay-kvrelay-prefill-worker"]["spec"]["triggers"]
    names |= {re.findall(r"kvrelay_[a-z_]+", trigger["metadata"]["query"])[0] for trigger in triggers}
    assert {"kvrelay_longest_wait_seconds", "kvrelay_num_requests_running"} <= names
    assert len(names) > 15
    assert names <= known, sorted(names - known)


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
    ended = helm("template", "relay", str(CHART), "--set", mistake)
    assert ended.returncode != 0
    assert says in ended.stderr


@needs_helm
def test_two_autoscalers_are_refused() -> None:
    ended = helm(
        "template", "relay", str(CHART),
        "--set", "prefill.autoscaling.hpa.enabled=true,prefill.autoscaling.keda.enabled=true",
    )  # fmt: skip
    assert ended.returncode != 0
    assert "prefill.autoscaling: hpa and keda are both enabled" in ended.stderr


@needs_helm
def test_keda_without_anything_to_ask_is_refused() -> None:
    ended = helm("template", "relay", str(CHART), "--set", "prefill.autoscaling.keda.enabled=true")
    assert ended.returncode != 0
    assert "prefill.autoscaling.keda: KEDA needs to know what to scale by; set prometheus" in ended.stderr


@needs_helm
def test_an_autoscaler_owns_the_replicas() -> None:
    plain, scaled = objects(), objects("--values", str(CHART / "examples/autoscaled.yaml"))
    for component in ("gateway", "prefill-worker", "decode-worker"):
        name = ("Deployment", f"relay-kvrelay-{component}")
        assert "replicas" in plain[name]["spec"]
        assert "replicas" not in scaled[name]["spec"]
    prefill = scaled["ScaledObject", "relay-kvrelay-prefill-worker"]["spec"]
    assert prefill["scaleTargetRef"]["name"] == "relay-kvrelay-prefill-worker"
    decode = scaled["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]
    assert decode["metrics"][0]["pods"]["metric"]["name"] == "kvrelay_kv_cache_usage_perc"


@needs_helm
@pytest.mark.parametrize(("resource", "device_type"), [("nvidia.com/gpu", "cuda"), ("", "cpu")])
def test_another_decode_worker_is_wanted_once_three_quarters_of_what_one_runs_do(
    resource: str, device_type: str
) -> None:
    found = objects("--set", f"decode.autoscaling.hpa.enabled=true,decode.gpu.resource={resource}")
    scaled = found["HorizontalPodAutoscaler", "relay-kvrelay-decode-worker"]["spec"]
    most = int(scaled["metrics"][1]["pods"]["target"]["averageValue"])
    assert most * 4 == sequences_at_a_time(None, device_type) * 3


@needs_helm
def test_nobody_may_more_than_needed() -> None:
    found = objects()
    assert [key for key in found if key[0] in ("ClusterRole", "ClusterRoleBinding")] == []
    (role,) = (document for (kind, _), document in found.items() if kind == "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    for component in ("gateway", "prefill-worker", "decode-worker"):
        pod = pod_of(found, component)
        assert pod["automountServiceAccountToken"] is (component == "gateway")
        assert pod["enableServiceLinks"] is False  # KVRELAY_PORT would become tcp://...
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@needs_helm
def test_policies_name_who_may_talk_to_whom() -> None:
    found = objects()

    def callers(component: str, port: str) -> set[str]:
        policy = found["NetworkPolicy", f"relay-kvrelay-{component}"]["spec"]
        return {
            peer["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component", "every pod")
            for rule in policy["ingress"]
            if port in [of["port"] for of in rule["ports"]]
            for peer in rule.get("from", [])
        }

    assert callers("prefill-worker", "control") == {"gateway"}
    assert callers("decode-worker", "control") == {"gateway", "prefill-worker"}
    assert callers("decode-worker", "data") == {"prefill-worker"}
    assert callers("decode-worker", "admin") == {"every pod"}


@needs_helm
@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector.obs:4318", 4318), ("https://[fd00::1]/otlp", 443), ("http://collector", 80)],
)
def test_a_gateway_that_traces_reaches_its_collector(endpoint: str, port: int) -> None:
    found = objects("--set", f"gateway.settings.trace_endpoint={endpoint}")
    assert env_of(pod_of(found, "gateway"))["KVRELAY_TRACE_ENDPOINT"] == endpoint
    egress = found["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"]
    assert {"ports": [{"port": port, "protocol": "TCP"}]} in egress


@needs_helm
def test_a_pool_of_gateways_is_one_that_endpoint_pickers_take() -> None:
    """By the reference of the Gateway API Inference Extension: inference.networking.k8s.io/v1."""
    name = {"type": "string", "minLength": 1, "maxLength": 253}
    port = {
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
        "required": ["number"],
        "additionalProperties": False,
    }
    label = {"type": "string", "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
    schema = {
        "type": "object",
        "properties": {
            "selector": {
                "type": "object",
                "properties": {"matchLabels": {"type": "object", "additionalProperties": label, "maxProperties": 64}},
                "required": ["matchLabels"],
                "additionalProperties": False,
            },
            "targetPorts": {"type": "array", "items": port, "minItems": 1, "maxItems": 8, "uniqueItems": True},
            "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
            "endpointPickerRef": {
                "type": "object",
                "properties": {
                    "group": {"type": "string", "maxLength": 253},
                    "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                    "name": name,
                    "port": port,
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
                "required": ["name", "port"],  # of a Service
                "additionalProperties": False,
            },
        },
        "required": ["selector", "targetPorts", "endpointPickerRef"],
        "additionalProperties": False,
    }
    found = objects("--values", str(CHART / "examples/inference-pool.yaml"))
    pool = found["InferencePool", "kvrelay"]
    jsonschema.validate(pool["spec"], schema)
    gateway = found["Deployment", "relay-kvrelay-gateway"]["spec"]["template"]
    selected = pool["spec"]["selector"]["matchLabels"]
    assert selected.items() <= gateway["metadata"]["labels"].items()
    worker = found["Deployment", "relay-kvrelay-decode-worker"]["spec"]["template"]
    assert not selected.items() <= worker["metadata"]["labels"].items()
    (container,) = gateway["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    [backend] = found["HTTPRoute", "kvrelay"]["spec"]["rules"][0]["backendRefs"]
    assert backend == {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": pool["metadata"]["name"],
    }


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
def test_each_of_several_models_has_its_pools() -> None:
    """By values over the common ones; the gateway knows all by name, finds their pods by label, and reads their tokenizers."""
    found = objects("--values", str(CHART / "examples/several-models.yaml"), *MONITORING)
    kinds = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "PodMonitor")
    pools = [f"relay-kvrelay-{model}-{role}-worker" for model in ("v1", "v2", "code") for role in ("prefill", "decode")]
    assert {(kind, name) for kind in kinds for name in pools} <= found.keys()
    assert ("Deployment", "relay-kvrelay-decode-worker") not in found
    selectors = [found["Deployment", name]["spec"]["selector"]["matchLabels"] for name in pools]
    assert len({json.dumps(selector, sort_keys=True) for selector in selectors}) == len(pools)
    gateway = pod_of(found, "gateway")
    named = dict(text.split("=", 1) for text in env_of(gateway)["KVRELAY_MODEL"].split(","))
    mounts = {mount["mountPath"] for mount in gateway["containers"][0]["volumeMounts"]}
    for model, path in named.items():
        pod = found["Deployment", f"relay-kvrelay-{model}-decode-worker"]["spec"]["template"]
        assert pod["metadata"]["labels"]["kvrelay.dev/model"] == model
        assert env_of(pod["spec"])["KVRELAY_SERVED_MODEL_NAME"] == model
        assert path.removeprefix(f"/models/{model}/") == env_of(pod["spec"])["KVRELAY_MODEL"].removeprefix("/model/")
        assert (f"/models/{model}" in mounts) is path.startswith("/models/")
    assert "/model" not in mounts
    assert env_of(gateway)["KVRELAY_ALIAS"] == "chat=v1:95+v2:5"
    assert found["Deployment", "relay-kvrelay-v1-decode-worker"]["spec"]["replicas"] == 3
    code = found["Deployment", "relay-kvrelay-code-decode-worker"]["spec"]
    assert (env_of(code["template"]["spec"])["KVRELAY_MAX_NUM_SEQS"], "replicas" in code) == ("128", False)
    scaled = found["HorizontalPodAutoscaler", "relay-kvrelay-code-decode-worker"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "relay-kvrelay-code-decode-worker"
    assert scaled["metrics"][1]["pods"]["target"]["averageValue"] == "96"
    (peer,) = found["NetworkPolicy", "relay-kvrelay-v2-decode-worker"]["spec"]["ingress"][1]["from"]
    assert peer["podSelector"]["matchLabels"]["kvrelay.dev/model"] == "v2"
    # The gateway's policy is about all of them.
    egress = json.dumps(found["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"])
    assert "kvrelay.dev/model" not in egress


@needs_helm
def test_a_models_name_stays_a_text() -> None:
    """A number, or true, is no label's value."""
    found = objects("--set-json", 'models={"1e5": {"model": {"name": "a/b"}}, "true": {"model": {"name": "c/d"}}}')
    for name in ("1e5", "true"):
        pod = found["Deployment", f"relay-kvrelay-{name}-decode-worker"]["spec"]["template"]
        assert pod["metadata"]["labels"]["kvrelay.dev/model"] == name
        assert env_of(pod["spec"])["KVRELAY_SERVED_MODEL_NAME"] == name


@needs_helm
@pytest.mark.parametrize(
    ("given", "volume"),
    [
        ("adapters.existingClaim=lora", {"persistentVolumeClaim": {"claimName": "lora"}}),
        ("adapters.hostPath=/srv/lora", {"hostPath": {"path": "/srv/lora", "type": "Directory"}}),
    ],
)
def test_all_pods_have_the_volume_of_adapters(given: str, volume: Manifest) -> None:
    """Gateways write what is brought over HTTP, so theirs is not read-only. Without a volume nobody serves any."""
    found = objects("--set", given)
    for component in ("gateway", "prefill-worker", "decode-worker"):
        pod = pod_of(found, component)
        (container,) = pod["containers"]
        mount = {"name": "adapters", "mountPath": env_of(pod)["KVRELAY_ADAPTERS"]}
        assert (mount if component == "gateway" else {**mount, "readOnly": True}) in container["volumeMounts"]
        assert {"name": "adapters", **volume} in pod["volumes"]
    assert "adapters" not in rendered()


@needs_helm
def test_each_of_several_models_has_adapters_of_its_own() -> None:
    models = {
        "a": {"model": {"name": "a/b"}, "adapters": {"existingClaim": "lora-a"}},
        "b": {"model": {"name": "c/d"}},
        "c": {"model": {"name": "e/f"}, "adapters": {"hostPath": "/srv/lora"}},
    }
    found = objects("--set-json", f"models={json.dumps(models)}")
    volumes = {
        "a": {"persistentVolumeClaim": {"claimName": "lora-a"}},
        "c": {"hostPath": {"path": "/srv/lora", "type": "Directory"}},
    }
    front = pod_of(found, "gateway")
    settings = build(GatewaySettings, {"adapters": env_of(front)["KVRELAY_ADAPTERS"]})
    for name, directory in settings.adapters_of(list(models)).items():
        assert {"name": f"adapters-{name}", "mountPath": directory} in front["containers"][0]["volumeMounts"]
        assert {"name": f"adapters-{name}", **volumes[name]} in front["volumes"]
    assert set(settings.adapters_of(list(models))) == set(volumes)
    for name in models:
        for role in ("prefill", "decode"):
            pod = pod_of(found, f"{name}-{role}-worker")
            there = [volume for volume in pod["volumes"] if volume["name"] == "adapters"]
            assert there == ([{"name": "adapters", **volumes[name]}] if name in volumes else [])
            assert ("KVRELAY_ADAPTERS" in env_of(pod)) is (name in volumes)
    refused = helm(
        "template", str(CHART), "--set", "adapters.hostPath=/srv", "--set-json", f"models={json.dumps(models)}"
    )
    assert "there are several: leave them out, and set models.NAME.adapters" in refused.stderr


@needs_helm
def test_workers_of_one_node_meet_in_a_directory_of_the_node() -> None:
    found = objects("--set", "sameHost.hostPath=/var/lib/kvrelay")
    for component in ("prefill-worker", "decode-worker"):
        pod = pod_of(found, component)
        (container,) = pod["containers"]
        directory = env_of(pod)["KVRELAY_SHARED_MEMORY"]
        assert {"name": "same-host", "mountPath": directory} in container["volumeMounts"]
        assert {"name": "same-host", "hostPath": {"path": "/var/lib/kvrelay", "type": "Directory"}} in pod["volumes"]
    assert "KVRELAY_SHARED_MEMORY" not in env_of(pod_of(found, "gateway"))
    assert "same-host" not in rendered()
    ended = helm("template", str(CHART), "--set", "sameHost.hostPath=/x,decode.settings.shared_memory=off")
    assert "decode.settings.shared_memory and sameHost.hostPath say different things" in ended.stderr


@needs_helm
def test_gpus_are_asked_for_by_any_name() -> None:
    found = objects("--set", r"decode.gpu.resource=nvidia\.com/mig-3g\.40gb", "--set", "prefill.gpu.resource=")
    decode = pod_of(found, "decode-worker")["containers"][0]
    prefill = pod_of(found, "prefill-worker")["containers"][0]
    assert decode["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    assert "limits" not in prefill["resources"]
    assert env_of(pod_of(found, "prefill-worker"))["KVRELAY_DEVICE"] == "cpu"


@needs_helm
def test_every_rank_has_a_gpu() -> None:
    """All of a worker's are in one pod; the pools need not have as many."""
    found = objects("--set", "decode.tensorParallel=4")
    for component, num_ranks in (("prefill-worker", 1), ("decode-worker", 4)):
        pod = pod_of(found, component)
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": num_ranks}
        assert env_of(pod)["KVRELAY_TENSOR_PARALLEL"] == str(num_ranks)
    on_cpus = pod_of(objects("--set", "decode.tensorParallel=2,decode.gpu.resource="), "decode-worker")
    assert "limits" not in on_cpus["containers"][0]["resources"]
    assert env_of(on_cpus)["KVRELAY_TENSOR_PARALLEL"] == "2"


@needs_helm
def test_every_rank_of_every_stage_has_a_gpu() -> None:
    found = objects("--set", "prefill.pipelineParallel=2,decode.tensorParallel=4,decode.pipelineParallel=2")
    for component, num_stages, num_gpus in (("prefill-worker", 2, 2), ("decode-worker", 2, 8)):
        pod = pod_of(found, component)
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": num_gpus}
        assert env_of(pod)["KVRELAY_PIPELINE_PARALLEL"] == str(num_stages)
    spread = objects("--set", "decode.tensorParallel=4,decode.pipelineParallel=2,decode.nodesPerWorker=2")
    pod = spread["StatefulSet", "relay-kvrelay-decode-worker"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}


NODES = "decode.replicas=3,decode.tensorParallel=4,decode.nodesPerWorker=2,networkPolicy.enabled=true"


@needs_helm
def test_a_worker_of_several_nodes_is_as_many_pods_of_one_set() -> None:
    """By the pods' own names the first is found by the others, in a Service that names pods before they are ready."""
    found = objects("--set", NODES)
    name = "relay-kvrelay-decode-worker"
    assert ("Deployment", name) not in found
    assert ("StatefulSet", "relay-kvrelay-prefill-worker") not in found
    spec = found["StatefulSet", name]["spec"]
    assert (spec["replicas"], spec["serviceName"], spec["podManagementPolicy"]) == (6, name, "Parallel")
    assert spec["template"]["metadata"]["labels"]["kvrelay.dev/nodes-per-worker"] == "2"
    assert "kvrelay.dev/nodes-per-worker" not in spec["selector"]["matchLabels"]
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    environment = env_of(pod)
    assert environment["KVRELAY_TENSOR_PARALLEL"] == "4"
    assert environment["KVRELAY_NODES"] == "2"
    settings = NodeSettings(nodes=2, node_name=f"{name}-3", leader_address=environment["KVRELAY_LEADER_ADDRESS"])
    place = place_of(settings, 4)
    assert place is not None
    assert (place.node_rank, place.leader) == (1, (f"{name}-2.{name}", 7202))
    service = found["Service", name]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert "publishNotReadyAddresses" not in found["Service", "relay-kvrelay-prefill-worker"]["spec"]


GROUPS = f"{NODES},decode.leaderWorkerSet=true"


@needs_helm
def test_a_worker_of_several_nodes_may_be_a_group_of_a_leader_worker_set() -> None:
    """Its operator tells each pod its number, and where the first is; the rest is what a StatefulSet's pods are."""
    found, of_set = objects("--set", GROUPS), objects("--set", NODES)
    name = "relay-kvrelay-decode-worker"
    assert ("StatefulSet", name) not in found
    group_set = found["LeaderWorkerSet", name]
    assert group_set["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = group_set["spec"]
    assert set(spec) == {"replicas", "leaderWorkerTemplate"}
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    template, other = group["workerTemplate"], of_set["StatefulSet", name]["spec"]["template"]
    environment = env_of(template["spec"])
    assert environment["KVRELAY_NODES"] == "2"
    leader = environment["KVRELAY_LEADER_ADDRESS"].replace("$(LWS_LEADER_ADDRESS)", f"{name}-2.{name}.here")
    node_rank = int(environment["KVRELAY_NODE_RANK"].replace("$(LWS_WORKER_INDEX)", "1"))
    place = place_of(NodeSettings(nodes=2, node_rank=node_rank, leader_address=leader), 4)
    assert place is not None
    assert (place.node_rank, place.leader) == (1, (f"{name}-2.{name}.here", 7202))
    for one in (template, other):
        container = one["spec"]["containers"][0]
        container["env"] = [
            variable
            for variable in container["env"]
            if variable["name"] not in ("KVRELAY_NODE_NAME", "KVRELAY_NODE_RANK", "KVRELAY_LEADER_ADDRESS")
        ]
    assert template == other
    assert found["Service", name] == of_set["Service", name]


@needs_helm
@pytest.mark.parametrize(
    "scaler", ["hpa.enabled=true", "keda.enabled=true,decode.autoscaling.keda.prometheus=http://p"]
)
def test_autoscalers_count_the_groups_of_a_leader_worker_set(scaler: str) -> None:
    found = objects("--set", f"{GROUPS},decode.autoscaling.{scaler}")
    name = "relay-kvrelay-decode-worker"
    kind = "HorizontalPodAutoscaler" if scaler.startswith("hpa") else "ScaledObject"
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": name}
    assert found[kind, name]["spec"]["scaleTargetRef"] == target
    assert "replicas" not in found["LeaderWorkerSet", name]["spec"]


@needs_helm
def test_all_pods_of_a_worker_of_several_nodes_have_the_adapters() -> None:
    found = objects("--set", f"{NODES},decode.pipelineParallel=2,adapters.existingClaim=lora")
    pod = found["StatefulSet", "relay-kvrelay-decode-worker"]["spec"]["template"]["spec"]
    mount = {"name": "adapters", "mountPath": env_of(pod)["KVRELAY_ADAPTERS"], "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {"name": "adapters", "persistentVolumeClaim": {"claimName": "lora"}} in pod["volumes"]


@needs_helm
def test_pods_of_a_worker_reach_each_other_on_all_ports_and_nobody_else_does() -> None:
    found = objects("--set", NODES)
    own = [
        {
            "podSelector": {
                "matchLabels": found["StatefulSet", "relay-kvrelay-decode-worker"]["spec"]["selector"]["matchLabels"]
            }
        }
    ]
    for component, rules in (("decode-worker", 1), ("prefill-worker", 0)):
        policy = found["NetworkPolicy", f"relay-kvrelay-{component}"]["spec"]
        assert policy["ingress"].count({"from": own}) == rules
        assert policy["egress"].count({"to": own}) == rules
        assert all("ports" in rule for rule in policy["ingress"] + policy["egress"] if own not in rule.values())


@needs_helm
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("decode.tensorParallel=4,decode.nodesPerWorker=3", "which 3 pods do not divide; take 1, 2, 4 pods"),
        (
            "prefill.nodesPerWorker=2",
            "tensorParallel times pipelineParallel is 1, which 2 pods do not divide; take 1 pods",
        ),
        (f"{NODES},decode.autoscaling.hpa.enabled=true", "an autoscaler counts pods, and a worker is 2 of them"),
        (f"{NODES},decode.autoscaling.keda.enabled=true", "an autoscaler counts pods, and a worker is 2 of them"),
        (f"{NODES},fullnameOverride={'long-' * 7}name", "is too long a name for a StatefulSet"),
        (f"{GROUPS},fullnameOverride={'long-' * 6}names", "is too long a name for a LeaderWorkerSet"),
        ("decode.leaderWorkerSet=true", "is for workers of several pods; set decode.nodesPerWorker"),
    ],
)
def test_nodes_that_cannot_be_are_refused_with_a_way_out(values: str, says: str) -> None:
    ended = helm("template", "relay", str(CHART), "--set", values)
    assert ended.returncode != 0
    assert says in ended.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "kind", "waits_for_sets"),
    [
        ("prefill.replicas=1", "deployment/relay-kvrelay-prefill-worker --replicas 2", False),
        (
            "prefill.tensorParallel=2,prefill.nodesPerWorker=2",
            "statefulset/relay-kvrelay-prefill-worker --replicas 4",
            True,
        ),
        (NODES, "deployment/relay-kvrelay-prefill-worker --replicas 2", True),
        (
            "models.a.model.name=x,models.b.model.name=y,models.a.prefill.tensorParallel=2,models.a.prefill.nodesPerWorker=2",
            "statefulset/relay-kvrelay-a-prefill-worker --replicas 4",
            True,
        ),
        (
            "prefill.tensorParallel=2,prefill.nodesPerWorker=2,prefill.leaderWorkerSet=true",
            "leaderworkerset/relay-kvrelay-prefill-worker --replicas 2",
            False,
        ),
    ],
)
def test_notes_name_what_there_is(values: str, kind: str, waits_for_sets: bool, tmp_path: Path) -> None:
    # Helm prints notes only where it reaches a cluster. As a template of the chart's they are rendered without one.
    chart = shutil.copytree(CHART, tmp_path / "chart")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\nnotes: {{{{ include "notes" . | toJson }}}}\n'
    )
    ended = helm("template", "relay", str(chart), "--show-only", "templates/notes.yaml", "--set", values)
    assert ended.returncode == 0, ended.stderr
    told = next(filter(None, yaml.safe_load_all(ended.stdout)))["notes"]
    assert f" scale {kind}\n" in told
    assert ("rollout status statefulset -l" in told) is waits_for_sets
    assert (" leaderworkerset -l " in told) is ("leaderWorkerSet=true" in values)


@needs_helm
def test_a_drain_fits_into_the_grace_period() -> None:
    found = objects("--set-json", 'decode.settings={"drain_s": 120.5}')
    assert pod_of(found, "decode-worker")["terminationGracePeriodSeconds"] == 121 + 15
    assert pod_of(found, "prefill-worker")["terminationGracePeriodSeconds"] == 30 + 15
    assert pod_of(found, "gateway")["terminationGracePeriodSeconds"] == 30 + 5 + 15


def test_what_is_generated_has_not_drifted() -> None:
    spec = importlib.util.spec_from_file_location("chart_tool", ROOT / "tools/chart.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (CHART / "README.md").read_text() == tool.readme((CHART / "values.yaml").read_text())
    assert yaml.safe_load((CHART / "values.schema.json").read_text()) == tool.schema()
