"""Settings: one name everywhere, checked once, and errors that name the value and the limit."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build, describe, setting
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.prefill_worker.settings import PrefillSettings


@dataclass(frozen=True)
class Inner:
    size: int = setting(4, "a size", unit="MiB", minimum=1, maximum=10)
    name: str | None = setting(None, "a name")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    mode: str = setting("fast", "a mode", choices=("fast", "slow"))
    rate: float = setting(0.5, "a rate", minimum=0)
    flag: bool = setting(False, "a flag")
    peers: tuple[str, ...] = setting((), "addresses")
    long_name: int = setting(0, "a long name")


@dataclass(frozen=True)
class Needy:
    outer: Outer
    address: str = setting(MISSING, "where to listen")
    ports: tuple[int, ...] | None = setting(None, "ports", minimum=1, maximum=65535)


def test_names_are_flat_and_the_same_everywhere() -> None:
    infos = {info.name: info for info in describe(Outer)}
    assert list(infos) == ["size", "name", "mode", "rate", "flag", "peers", "long_name"]
    assert (infos["size"].flag, infos["size"].variable) == ("--size", "KVRELAY_SIZE")
    assert (infos["long_name"].flag, infos["long_name"].variable) == ("--long-name", "KVRELAY_LONG_NAME")
    assert (infos["name"].is_optional, infos["peers"].is_list) == (True, True)


def test_values_are_converted_and_the_rest_are_defaults() -> None:
    made = build(Outer, {"size": "7", "flag": "yes", "peers": "a, b,", "rate": 2})
    assert made == Outer(Inner(7, None), "fast", 2.0, True, ("a", "b"), 0)
    assert build(Outer, {"peers": ["x"]}).peers == ("x",)
    assert build(Outer, {"name": None}).inner.name is None


def test_a_setting_without_a_default_is_needed_by_all_its_names() -> None:
    with pytest.raises(SettingsError, match=r"--address \(or KVRELAY_ADDRESS\) is needed: where to listen"):
        build(Needy, {"size": 3})
    made = build(Needy, {"address": "a:1", "ports": "1, 2", "long-name": 5})
    assert (made.address, made.ports, made.outer.long_name, made.outer.inner.size) == ("a:1", (1, 2), 5, 4)
    with pytest.raises(SettingsError, match="--ports is 0; it must be at least 1"):
        build(Needy, {"address": "a:1", "ports": [1, 0]})
    assert build(Needy, {"address": "a:1", "ports": ""}).ports == ()


def test_types_that_are_no_settings_are_a_programmers_error() -> None:
    @dataclass(frozen=True)
    class Raw:
        raw: bytes = setting(None, "bytes")

    @dataclass(frozen=True)
    class Either:
        both: int | str = setting(None, "either")

    for declared in (Raw, Either):
        with pytest.raises(TypeError, match="a setting"):
            describe(declared)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sise": 1}, "unknown setting 'sise'; did you mean 'size'"),
        ({"size": 0}, "--size is 0 MiB; it must be at least 1 MiB"),
        ({"size": "11"}, "--size is 11 MiB; it must be at most 10 MiB"),
        ({"size": "big"}, "--size takes a whole number, not 'big'"),
        ({"size": 1.5}, "--size takes a whole number, not 1.5"),
        ({"size": True}, "--size takes a whole number, not True"),
        ({"mode": "medium"}, "--mode is 'medium'; it must be one of fast, slow"),
        ({"rate": "x"}, "--rate takes a number, not 'x'"),
        ({"flag": "maybe"}, "--flag takes true or false, not 'maybe'"),
        ({"peers": 7}, "--peers takes a list, not 7"),
        ({"mode": None}, "--mode has no value"),
        ({"rate": "nan"}, "--rate takes a number, not 'nan'"),
        ({"rate": float("inf")}, "--rate takes a number, not inf"),
        ({"rate": -0.5}, "--rate is -0.5; it must be at least 0"),
        ({"name": ["a"]}, "--name takes text, not ['a']"),
        ({"name": {"a": 1}}, "--name takes text, not {'a': 1}"),
        ({"name": True}, "--name takes text, not True"),
        ({"flag": 2}, "--flag takes true or false, not 2"),
        ({"peers": ["a", ["b"]]}, "--peers takes text, not ['b']"),
        ({"long-name": 1, "long_name": 2}, "'long_name' is set twice"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(Outer, values, source="file.toml")
    assert str(caught.value).startswith(f"file.toml: {text}")


def test_a_name_used_twice_is_a_programmers_error() -> None:
    @dataclass(frozen=True)
    class Twice:
        inner: Inner
        size: int = setting(1, "again")

    with pytest.raises(TypeError, match="size"):
        describe(Twice)


@pytest.mark.parametrize("settings", [GatewaySettings, PrefillSettings, DecodeSettings])
def test_every_setting_of_every_component_has_a_default_and_a_line_of_help(settings: type) -> None:
    build(settings, {})
    assert all(len(info.help) > 5 for info in describe(settings))
