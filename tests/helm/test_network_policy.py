"""The chart's network policies: which connections are allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .chart import NODES, env_of, needs_helm, objects, pod_of


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
@pytest.mark.parametrize(
    ("hosts", "ports"),
    [
        (["images.example.com"], [443]),
        (["images.example.com", "*.cdn.example", "http://plain.example"], [443, 80]),
        (["http://minio:9000", "[fd00::1]:8443", "http://[fd00::2]", "https://[fd00::3]"], [9000, 8443, 80, 443]),
    ],
)
def test_a_gateway_reaches_the_hosts_of_images_and_no_worker_does(hosts: list[str], ports: list[int]) -> None:
    found = objects("--set-json", f"gateway.settings.image_hosts={json.dumps(hosts)}")
    assert env_of(pod_of(found, "gateway"))["KVRELAY_IMAGE_HOSTS"] == ",".join(hosts)
    rule = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    egress = found["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"]
    without = objects()["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"]
    assert [one for one in egress if one not in without] == [rule]
    for component in ("prefill-worker", "decode-worker"):
        name = ("NetworkPolicy", f"relay-kvrelay-{component}")
        assert found[name] == objects()[name]


@needs_helm
def test_an_empty_list_of_hosts_lets_a_gateway_out_nowhere() -> None:
    """A rule without ports would allow all."""
    policy = ("NetworkPolicy", "relay-kvrelay-gateway")
    assert objects("--set-json", "gateway.settings.image_hosts=[]")[policy] == objects()[policy]


@needs_helm
def test_a_gateway_reaches_the_api_server_wherever_it_listens() -> None:
    def ports(*arguments: str) -> list[list[int]]:
        rules = objects(*arguments)["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"]
        return [[of["port"] for of in rule["ports"]] for rule in rules if "to" not in rule]

    dns = [53, 53]
    assert ports() == [dns, [443, 6443, 8443, 16443]]
    assert ports("--set", "networkPolicy.apiServerPorts={7443}") == [dns, [7443]]
    assert ports("--set-json", "networkPolicy.apiServerPorts=[]") == [dns], "a rule without ports would allow all"


@needs_helm
def test_all_pods_may_be_let_out_further() -> None:
    proxy: dict[str, Any] = {
        "to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}],
        "ports": [{"port": 3128, "protocol": "TCP"}],
    }
    model = "model.source=volume,model.volume.hostPath=/models"  # then workers download nothing
    found = objects("--set-json", f"networkPolicy.extraEgress={json.dumps([proxy])}", "--set", model)
    for component in ("gateway", "prefill-worker", "decode-worker"):
        assert proxy in found["NetworkPolicy", f"relay-kvrelay-{component}"]["spec"]["egress"]


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
