"""The volume of adapters."""

from __future__ import annotations

import json

import pytest

from kvrelay.common.settings import build
from kvrelay.gateway.settings import GatewaySettings

from .chart import CHART, NODES, Manifest, env_of, helm, needs_helm, objects, pod_of, refusal, rendered


@needs_helm
@pytest.mark.parametrize(
    ("given", "volume"),
    [
        ("adapters.existingClaim=lora", {"persistentVolumeClaim": {"claimName": "lora"}}),
        ("adapters.hostPath=/srv/lora", {"hostPath": {"path": "/srv/lora", "type": "Directory"}}),
    ],
)
def test_all_pods_have_the_volume_of_adapters(given: str, volume: Manifest) -> None:
    """Every pod mounts the volume, read-only except in gateways, which store uploaded adapters. By default there is no
    volume."""
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
@pytest.mark.parametrize(
    ("role", "value"), [("gateway", "gateway.settings.adapters[0]"), ("prefill", "prefill.settings.adapters")]
)
def test_adapters_are_named_in_one_place(role: str, value: str) -> None:
    assert f"leave {role}.settings.adapters out" in refusal(f"adapters.hostPath=/srv,{value}=/elsewhere")
    component = "gateway" if role == "gateway" else f"{role}-worker"
    assert env_of(pod_of(objects("--set", f"{value}=/own"), component))["KVRELAY_ADAPTERS"] == "/own"


@needs_helm
def test_all_pods_of_a_worker_of_several_nodes_have_the_adapters() -> None:
    found = objects("--set", f"{NODES},decode.pipelineParallel=2,adapters.existingClaim=lora")
    pod = found["StatefulSet", "relay-kvrelay-decode-worker"]["spec"]["template"]["spec"]
    mount = {"name": "adapters", "mountPath": env_of(pod)["KVRELAY_ADAPTERS"], "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {"name": "adapters", "persistentVolumeClaim": {"claimName": "lora"}} in pod["volumes"]
