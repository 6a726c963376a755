"""Several models behind one gateway."""

from __future__ import annotations

import json
import re

import pytest

from .chart import CHART, MONITORING, env_of, needs_helm, objects, pod_of, refusal


@needs_helm
def test_each_of_several_models_has_its_pools() -> None:
    """Each model's values override the common ones. The gateway knows every model's name, labels and tokenizer."""
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
    # One policy of the gateway covers the pools of all models.
    egress = json.dumps(found["NetworkPolicy", "relay-kvrelay-gateway"]["spec"]["egress"])
    assert "kvrelay.dev/model" not in egress


@needs_helm
def test_a_models_name_stays_a_text() -> None:
    """A model named as a number or as ``true`` is rendered as a string, because labels must be strings."""
    found = objects("--set-json", 'models={"1e5": {"model": {"name": "a/b"}}, "true": {"model": {"name": "c/d"}}}')
    for name in ("1e5", "true"):
        pod = found["Deployment", f"relay-kvrelay-{name}-decode-worker"]["spec"]["template"]
        assert pod["metadata"]["labels"]["kvrelay.dev/model"] == name
        assert env_of(pod["spec"])["KVRELAY_SERVED_MODEL_NAME"] == name


@needs_helm
@pytest.mark.parametrize(("common", "token"), [("", "of-b"), (",model.huggingFace.tokenSecret.name=common", "common")])
def test_a_gateway_may_download_the_tokenizer_of_a_gated_model(common: str, token: str) -> None:
    """The token may be named at the model alone."""
    named = "models.a.model.name=x/a,models.b.model.name=x/b,models.b.model.huggingFace.tokenSecret.name=of-b"
    variables = pod_of(objects("--set", named + common), "gateway")["containers"][0]["env"]
    (secret,) = [one["valueFrom"]["secretKeyRef"] for one in variables if one["name"] == "HF_TOKEN"]
    assert secret == {"name": token, "key": "token"}


SHARED = "prefill.serviceAccount.name=shared,decode.serviceAccount.name=shared"


@needs_helm
def test_pools_that_name_one_service_account_share_it() -> None:
    """The account is rendered once. A pool of one model may still have its own."""
    accounts = f"{SHARED},models.code.prefill.serviceAccount.name=own"
    found = objects("--values", str(CHART / "examples/several-models.yaml"), "--set", accounts)
    assert {("ServiceAccount", "shared"), ("ServiceAccount", "own")} <= found.keys()
    for model, account in (("v1", "shared"), ("v2", "shared"), ("code", "own")):
        pod = found["Deployment", f"relay-kvrelay-{model}-prefill-worker"]["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == account


@needs_helm
def test_one_service_account_has_one_set_of_annotations() -> None:
    """An identity that only one of two pools gives would depend on the order of pools."""
    role = "decode.serviceAccount.annotations.role=reader"
    assert "serviceAccount shared has other annotations in decode" in refusal(f"{SHARED},{role}")
    found = objects("--set", f"{SHARED},{role},prefill.serviceAccount.create=false")
    assert found["ServiceAccount", "shared"]["metadata"]["annotations"] == {"role": "reader"}


@needs_helm
def test_alerts_and_autoscalers_find_pods_however_long_the_names_are() -> None:
    """A Deployment's pods have the first 58 characters of its ReplicaSet's name and a dash, and five more."""
    values = {"fullnameOverride": "long-" * 7 + "names"}
    for model in ("a", "a-model-of-20-letters"[:20]):
        values |= {f"models.{model}.model.name": "x", f"models.{model}.prefill.autoscaling.keda.enabled": "true"}
        values[f"models.{model}.prefill.autoscaling.keda.prometheus"] = "http://x"
    found = objects(*MONITORING, "--set", ",".join(f"{name}={value}" for name, value in values.items()))
    pods = [f"{f'{name}-0123456789-'[:58]}abcde" for kind, name in found if kind == "Deployment"]
    assert len(pods) == 5

    def chosen(expression: str) -> set[str]:
        (pattern,) = set(re.findall(r'pod=~"([^"]*)"', expression))
        return {pod for pod in pods if re.fullmatch(pattern, pod)}

    (group,) = found["PrometheusRule", values["fullnameOverride"]]["spec"]["groups"]
    decode = [chosen(rule["expr"]) for rule in group["rules"] if rule["alert"] == "KvrelayDecodeFull"]
    scaled = [one["spec"]["triggers"] for (kind, _), one in found.items() if kind == "ScaledObject"]
    prefill = [chosen(trigger["metadata"]["query"]) for triggers in scaled for trigger in triggers[:1]]
    assert [len(one) for one in (*decode, *prefill)] == [1] * 4
    others = [chosen(rule["expr"]) for rule in group["rules"] if rule["alert"] != "KvrelayDecodeFull"]
    assert set.union(*decode, *prefill) < set(pods)
    assert others
    assert all(one == set(pods) for one in others)
    # The dashboard finds pods by their role.
    assert sum("-decode-worker-" in pod for pod in pods) == 2
    assert sum("-prefill-worker-" in pod for pod in pods) == 2
