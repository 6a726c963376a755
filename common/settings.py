"""Settings: one frozen dataclass per component, one name everywhere, checked once at the entry point.

A component declares its settings as a frozen dataclass whose fields are made by :func:`setting`; groups are nested
dataclasses, flattened by :func:`describe`. The field ``max_num_seqs`` is the flag ``--max-num-seqs``, the variable
``KVRELAY_MAX_NUM_SEQS``, and the key ``max_num_seqs`` (or ``max-num-seqs``) in a config file. :func:`build` makes the
dataclass from such names and raises on anything it does not understand; nothing changes afterwards.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvrelay.common.errors import SettingsError

T = TypeVar("T")


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word every CLI library uses
    *,
    unit: str | None = None,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that is a setting: its default, its line of documentation and its limits."""
    metadata = {"help": help, "unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting, as flags, variables and documentation see it."""

    name: str  # with underscores
    kind: type  # of one value: str, int, float or bool
    is_optional: bool  # None is a value, and means "choose for me"
    is_list: bool  # a tuple of ``kind``; comma separated in flags and variables
    default: Any
    help: str
    unit: str | None
    choices: tuple[str, ...] | None
    minimum: float | None
    maximum: float | None

    @property
    def flag(self) -> str:
        """``--max-num-seqs``"""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """``KVRELAY_MAX_NUM_SEQS``"""
        return "KVRELAY_" + self.name.upper()


def describe(cls: type) -> list[SettingInfo]:
    """All settings of a settings dataclass in order, nested groups flattened. Raises TypeError on a name used twice."""
    infos: list[SettingInfo] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            infos.extend(describe(typing.cast(type, hint)))
            continue
        kind, is_optional, is_list = _unwrap(hint)
        meta = field.metadata
        infos.append(
            SettingInfo(
                name=field.name,
                kind=kind,
                is_optional=is_optional,
                is_list=is_list,
                default=field.default,
                help=meta["help"],
                unit=meta.get("unit"),
                choices=meta.get("choices"),
                minimum=meta.get("minimum"),
                maximum=meta.get("maximum"),
            )
        )
    names = [info.name for info in infos]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TypeError(f"{cls.__name__} declares a setting twice: {', '.join(twice)}")
    return infos


def build(cls: type[T], values: Mapping[str, Any], *, source: str = "settings") -> T:
    """Make ``cls`` from flat ``values`` (names with ``-`` or ``_``; strings are converted); the rest are defaults.

    Raises SettingsError that names the setting, its value, the limit and ``source`` on an unknown name, a value of the
    wrong type, one out of its range, or a missing setting that has no default.
    """
    return _assemble(cls, check(describe(cls), values, source=source), source)


def check(infos: Sequence[SettingInfo], values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """``values`` by the names of ``infos``, converted. Raises SettingsError as :func:`build` does, but for what is missing."""
    by_name = {info.name: info for info in infos}
    checked: dict[str, Any] = {}
    for raw_name, value in values.items():
        name = raw_name.replace("-", "_")
        if name not in by_name:
            raise SettingsError(f"{source}: unknown setting {raw_name!r}; {closest(name, by_name)}")
        if name in checked:
            raise SettingsError(f"{source}: {name!r} is set twice, with '-' and with '_'")
        checked[name] = _check(by_name[name], value, source)
    return checked


def closest(name: str, known: Collection[str]) -> str:
    """What was probably meant by ``name``, in words; all of ``known`` if that cannot be guessed."""
    found = difflib.get_close_matches(name, known, 1)
    return f"did you mean {found[0]!r}?" if found else f"known are: {', '.join(sorted(known))}"


def _assemble(cls: type[T], checked: Mapping[str, Any], source: str) -> T:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            arguments[field.name] = _assemble(typing.cast(type, hint), checked, source)
        elif field.name in checked:
            arguments[field.name] = checked[field.name]
        elif field.default is dataclasses.MISSING:
            info = next(info for info in describe(cls) if info.name == field.name)
            raise SettingsError(f"{source}: {info.flag} (or {info.variable}) is needed: {info.help}")
    return cls(**arguments)


def _unwrap(hint: Any) -> tuple[type, bool, bool]:
    is_optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(parts) != 1:
            raise TypeError(f"a setting has one type, not {hint}")
        is_optional, hint = True, parts[0]
    is_list = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if is_list else hint
    if kind not in (str, int, float, bool):
        raise TypeError(f"a setting is str, int, float, bool or a tuple of them, not {hint}")
    return kind, is_optional, is_list


def _check(info: SettingInfo, value: Any, source: str) -> Any:
    if value is None:
        if info.is_optional:
            return None
        raise SettingsError(f"{source}: {info.flag} has no value")
    if info.is_list:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise SettingsError(f"{source}: {info.flag} takes a list, not {value!r}")
        stripped = [part.strip() if isinstance(part, str) else part for part in parts]
        return tuple(_check_one(info, part, source) for part in stripped if part != "")
    return _check_one(info, value, source)


def _check_one(info: SettingInfo, value: Any, source: str) -> Any:
    converted = _convert(info, value, source)
    if info.choices is not None and converted not in info.choices:
        raise SettingsError(f"{source}: {info.flag} is {converted!r}; it must be one of {', '.join(info.choices)}")
    unit = f" {info.unit}" if info.unit else ""
    if info.minimum is not None and converted < info.minimum:
        raise SettingsError(
            f"{source}: {info.flag} is {converted}{unit}; it must be at least {info.minimum:.12g}{unit}"
        )
    if info.maximum is not None and converted > info.maximum:
        raise SettingsError(f"{source}: {info.flag} is {converted}{unit}; it must be at most {info.maximum:.12g}{unit}")
    return converted


def _convert(info: SettingInfo, value: Any, source: str) -> Any:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        if info.kind is bool:
            return value if isinstance(value, bool) else words[str(value).lower()]
        if isinstance(value, bool):
            raise ValueError("a truth value")
        if info.kind is int and isinstance(value, float):
            raise ValueError("not a whole number")
        if info.kind is str and not isinstance(value, str | int | float):
            raise ValueError("not a single value")
        converted = info.kind(value)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("passes no comparison, or every one")
        return converted
    except (KeyError, ValueError, TypeError) as error:
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[info.kind]
        raise SettingsError(f"{source}: {info.flag} takes {expected}, not {value!r}") from error
