"""Wire keys, API keys, certificates, and the permissions of pods."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kvrelay.gateway.http.api_keys import ApiKeys
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys

from .chart import CHART, MONITORING, env_of, needs_helm, objects, pod_of


@needs_helm
def test_keys_that_the_chart_makes_are_keys(tmp_path: Path) -> None:
    """The chart makes a key pair for each role, which the programs can load. Every rendering makes new ones."""
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
    """Probes, Service, Ingress, PodMonitor and `helm test` use https. The Secret is mounted at the paths that the
    program reads."""
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
def test_nobody_may_more_than_needed() -> None:
    found = objects()
    assert [key for key in found if key[0] in ("ClusterRole", "ClusterRoleBinding")] == []
    (role,) = (document for (kind, _), document in found.items() if kind == "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    for component in ("gateway", "prefill-worker", "decode-worker"):
        pod = pod_of(found, component)
        assert pod["automountServiceAccountToken"] is (component == "gateway")
        assert pod["enableServiceLinks"] is False  # service links would set KVRELAY_PORT to tcp://...
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
