"""Settings: one name everywhere, checked once, errors that name value and limit."""

from __future__ import annotations

from dataclasses import dataclass

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


def test_names_are_flat_and_the_same_everywhere() -> None:
    infos = {info.name: info for info in describe(Outer)}
    assert list(infos) == ["size", "name", "mode", "rate", "flag", "peers"]
    assert (infos["size"].flag, infos["size"].variable) == ("--size", "KVRELAY_SIZE")
    assert (infos["name"].is_optional, infos["peers"].is_list) == (True, True)


def test_values_are_converted_and_the_rest_are_defaults() -> None:
    made = build(Outer, {"size": "7", "flag": "yes", "peers": "a, b,", "rate": 2})
    assert made == Outer(Inner(7, None), "fast", 2.0, True, ("a", "b"))
    assert build(Outer, {"peers": ["x"]}).peers == ("x",)
    assert build(Outer, {"name": None}).inner.name is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sise": 1}, "unknown setting 'sise'; known are: flag, mode"),
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
