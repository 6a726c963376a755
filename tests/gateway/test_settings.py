"""Settings that cannot work are refused by name before anything starts."""

from __future__ import annotations

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.gateway.model_names import Alias, NamedModel
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.workers.pool import static_workers


@pytest.mark.parametrize(
    "address",
    ["tcp://10.0.0.8:7200", "tcp://decode-0.decode:1", "tcp://[::1]:7200", "ipc:///run/kvrelay/d", "inproc://d"],
)
def test_addresses_of_workers(address: str) -> None:
    settings = build(GatewaySettings, {"decode-workers": address, "prefill-workers": [address]})
    assert settings.workers.decode_workers == settings.workers.prefill_workers == (address,)


@pytest.mark.parametrize(
    "address",
    ["nonsense", "10.0.0.8:7200", "tcp://10.0.0.8", "tcp://:7200", "tcp://h:0", "tcp://h:70000", "http://h:1"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_address_that_no_worker_can_have(address: str, role: str) -> None:
    with pytest.raises(SettingsError, match=f"--{role}-workers.*tcp://HOST:PORT") as caught:
        build(GatewaySettings, {f"{role}_workers": [address]})
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(("given", "missing"), [("tls-cert", "tls-key"), ("tls-key", "tls-cert")])
def test_tls_needs_both_of_its_files(given: str, missing: str) -> None:
    with pytest.raises(SettingsError, match=f"--{given} is set and --{missing} is not.*set --{missing}, too"):
        build(GatewaySettings, {given: "/somewhere"})
    assert build(GatewaySettings, {given: "/here", missing: "/there"}).tls.tls_cert is not None


def test_somebody_must_decode() -> None:
    with pytest.raises(SettingsError, match="--decode-workers is empty"):
        build(GatewaySettings, {"decode_workers": ""})


# -- several models ------------------------------------------------------------------------------------------------

TWO = {"model": "small=/models/a,/models/b"}
NAMES = ["small", "b"]


def test_models_have_names_aliases_and_workers() -> None:
    given = {
        **TWO,
        "alias": "chat=b,canary=small:90+b:10,gpt:4=small",
        "decode_workers": "small=tcp://d:1,b=ipc:///run/x=y",
    }
    settings = build(GatewaySettings, given)
    assert settings.named_models() == [NamedModel("small", "/models/a"), NamedModel("", "/models/b")]
    assert settings.aliases_of(NAMES) == [
        Alias("chat", (("b", 1.0),)),
        Alias("canary", (("small", 90.0), ("b", 10.0))),
        Alias("gpt:4", (("small", 1.0),)),
    ]
    found = static_workers((), settings.workers.decode_workers)
    assert [(worker.model, worker.address) for worker in found] == [("small", "tcp://d:1"), ("b", "ipc:///run/x=y")]
    alone = build(GatewaySettings, {"model": "./odd=name", "served_model_name": "tiny"})
    assert alone.named_models() == [NamedModel("tiny", "./odd=name")]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alias": "chat"}, "'chat' is no alias; write ALIAS=MODEL"),
        ({"alias": "b=small"}, "'b' is the name of a model"),
        ({"alias": "chat=smal"}, "'smal' of 'chat' is no model.*did you mean 'small'"),
        ({"alias": "chat=small:5"}, "'small:5' of 'chat' is no model, nor MODEL:WEIGHT"),
        ({"alias": "chat=small+b:5"}, "is no model, nor MODEL:WEIGHT"),
        ({"alias": "chat=small:5+c:5"}, "'chat' has a part for 'c', which is no model"),
        ({"alias": "chat=small:0+b:0"}, "the weights of 'chat' are all 0"),
        ({"alias": "chat=b,chat=small"}, "'chat' is there twice"),
        ({"default_model": "c"}, "--default-model: 'c' is not served"),
        ({"decode_workers": "tcp://d:1"}, "tcp://d:1 has no model, and there are 2; write MODEL=tcp://d:1"),
        ({"decode_workers": "c=tcp://d:1"}, "c=tcp://d:1: 'c' is not served"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused_by_name(given: dict[str, str], says: str) -> None:
    settings = build(GatewaySettings, {**TWO, "decode_workers": "small=tcp://d:1,b=tcp://d:2", **given})
    check = settings.check_workers if "decode_workers" in given else settings.aliases_of
    with pytest.raises(SettingsError, match=says):
        check(NAMES)


def test_names_of_several_models_are_labels_in_kubernetes() -> None:
    settings = build(GatewaySettings, {"model": "org/a,org/b", "discovery": "kubernetes"})
    with pytest.raises(
        SettingsError, match=r"'org/a' cannot be the value of the label kvrelay.dev/model; write NAME=org/a"
    ):
        settings.check_workers(["org/a", "org/b"])
    with pytest.raises(SettingsError, match="two models have one name among a; write NAME=MODEL"):
        settings.aliases_of({"a": 1})
    with pytest.raises(SettingsError, match="--model is empty"):
        build(GatewaySettings, {"model": ""})
    with pytest.raises(SettingsError, match="--served-model-name is 'x', but there are 2 models"):
        build(GatewaySettings, {**TWO, "served_model_name": "x"})


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        ("/lora", ["demo"], {"demo": "/lora"}),
        ("./a=b", ["demo"], {"demo": "./a=b"}),
        ("demo=/lora", ["demo"], {"demo": "/lora"}),
        ("org/b=/lora, a=/x=y", ["a", "org/b", "c"], {"org/b": "/lora", "a": "/x=y"}),
        ((), ["a", "b"], {}),
    ],
)
def test_directories_of_adapters_are_told_by_model(given: str, names: list[str], expected: dict[str, str]) -> None:
    assert build(GatewaySettings, {"adapters": given}).adapters_of(names) == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("/lora", "--adapters: '/lora' has no model, and there are 2; write MODEL=/lora"),
        ("lrge=/lora", "--adapters: 'lrge' of 'lrge=/lora' is not served; did you mean 'large'"),
        ("small=/a,small=/b", "--adapters: 'small' has two directories; leave one out"),
    ],
)
def test_a_directory_of_adapters_that_is_no_models_is_refused(given: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        build(GatewaySettings, {"adapters": given}).adapters_of(["small", "large"])
