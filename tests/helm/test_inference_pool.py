"""The InferencePool of gateways, for endpoint pickers."""

from __future__ import annotations

import jsonschema

from .chart import CHART, needs_helm, objects


@needs_helm
def test_a_pool_of_gateways_is_one_that_endpoint_pickers_take() -> None:
    """The spec follows the reference of the Gateway API Inference Extension, and its selector matches gateways only."""
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
                "required": ["name", "port"],  # for a Service as picker
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
