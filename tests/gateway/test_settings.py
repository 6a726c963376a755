"""Settings that cannot work are refused by name before anything starts."""

from __future__ import annotations

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build, describe
from kvrelay.gateway.settings import GatewaySettings


def test_every_setting_has_its_line_of_documentation() -> None:
    infos = describe(GatewaySettings)
    assert all(info.help for info in infos)
    assert {"policy", "local_prefill", "max_body_bytes", "decode_workers"} <= {info.name for info in infos}


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
