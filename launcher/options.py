"""Command line options, environment variables and config files, generated from a settings dataclass.

One declaration (:func:`kvrelay.common.settings.setting`) gives ``--max-num-seqs``, ``KVRELAY_MAX_NUM_SEQS`` and the key
``max_num_seqs`` in a TOML file. A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import SettingInfo, build, describe

T = TypeVar("T")

CONFIG_PARAMETER = "config_file"


def options_of(cls: type) -> list[click.Parameter]:
    """``--config`` and one option for each setting of ``cls``, in order.

    The options carry text: conversion and limits belong to ``build``, so that a flag, a variable and a file get the
    same errors. Their default here is None, "not given"; the real default is shown in the help.
    """
    config = click.Option(
        ["--config", CONFIG_PARAMETER],
        metavar="FILE",
        help="TOML file with these settings as keys, such as max_num_seqs = 8.  [env: KVRELAY_CONFIG]",
    )
    return [config, *(_option(info) for info in describe(cls))]


def load_settings(cls: type[T], flags: Mapping[str, Any], environment: Mapping[str, str]) -> T:
    """Make ``cls`` from what the command line gave, the environment, and the config file that either of them names.

    ``flags`` are click's parameters (None: not given). Raises SettingsError that names the setting, the value, the limit
    and where the value came from; a bad value is an error also if a stronger source overrides it.
    """
    given = {name: value for name, value in flags.items() if value is not None and name != CONFIG_PARAMETER}
    config_file = flags.get(CONFIG_PARAMETER) or environment.get("KVRELAY_CONFIG")
    from_file = _read_config(Path(config_file)) if config_file else {}
    # An empty variable means "not set": charts and compose files write those for values nobody gave.
    from_environment = {
        info.name: environment[info.variable] for info in describe(cls) if environment.get(info.variable)
    }
    merged = {**from_file, **from_environment, **given}
    needed = {info.name for info in describe(cls) if _has_no_default(info)}
    supplied = {name: merged[name] for name in needed if name in merged}
    for source, layer in ((str(config_file), from_file), ("environment", from_environment), ("command line", given)):
        if layer:
            build(cls, {**supplied, **layer}, source=source)
    return build(cls, merged, source="settings")


def command_line(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Flags that give ``values`` to a component whose settings are ``cls``; None is left out.

    Raises SettingsError if ``cls`` has no such setting.
    """
    infos = {info.name: info for info in describe(cls)}
    arguments: list[str] = []
    for name, value in values.items():
        if name not in infos:
            raise SettingsError(f"{cls.__name__} has no setting {name!r}; known are: {', '.join(sorted(infos))}")
        info = infos[name]
        if value is None:
            continue
        if info.kind is bool and not info.is_list:
            arguments.append(info.flag if value else _negation(info))
        else:
            text = ",".join(str(part) for part in value) if info.is_list else str(value)
            arguments.append(f"{info.flag}={text}")
    return arguments


def _has_no_default(info: SettingInfo) -> bool:
    return info.default is dataclasses.MISSING


def _negation(info: SettingInfo) -> str:
    return "--no-" + info.flag.removeprefix("--")


def _option(info: SettingInfo) -> click.Option:
    if info.kind is bool and not info.is_list:
        return click.Option([f"{info.flag}/{_negation(info)}", info.name], default=None, help=_help(info))
    if info.choices is not None:
        metavar = "|".join(info.choices)
    else:
        metavar = {str: "TEXT", int: "N", float: "X", bool: "BOOL"}[info.kind] + (",…" if info.is_list else "")
    return click.Option([info.flag, info.name], default=None, metavar=metavar, help=_help(info))


def _help(info: SettingInfo) -> str:
    notes = [f"env: {info.variable}"]
    if _has_no_default(info):
        notes.append("needed")
    elif info.default is not None and info.default != ():
        default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
        notes.append(f"default: {default}{f' {info.unit}' if info.unit else ''}")
    return f"{info.help}.  [{'; '.join(notes)}]"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from error
    tables = [name for name, value in values.items() if isinstance(value, dict)]
    if tables:
        raise SettingsError(f"{path}: the settings are flat keys, not tables; found [{'], ['.join(tables)}]")
    return {name.replace("-", "_"): value for name, value in values.items()}
