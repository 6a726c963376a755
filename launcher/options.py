"""Generates command line options, environment variables and config files from a settings dataclass.

One declaration (:func:`kvrelay.common.settings.setting`) gives ``--max-num-seqs``, ``KVRELAY_MAX_NUM_SEQS`` and the key
``max_num_seqs`` of a TOML file. A flag overrides a variable, a variable the file, and the file the default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import SettingInfo, build, check, closest, describe

T = TypeVar("T")

CONFIG_PARAMETER = "config_file"
_PREFIX = "KVRELAY_"
_CONFIG_VARIABLE = _PREFIX + "CONFIG"
_OF_TESTS = _PREFIX + "TEST_"


@dataclass(frozen=True, slots=True)
class Options(Generic[T]):
    """The settings of a command, and the function that makes the settings object."""

    infos: Sequence[SettingInfo]
    make: Callable[[Mapping[str, Any]], T]  # from checked values by name; raises SettingsError

    @classmethod
    def of(cls, settings: type[T]) -> Options[T]:
        """The options of a settings dataclass."""
        return cls(describe(settings), lambda values: build(settings, values))

    def parameters(self, common: Sequence[str] = ()) -> list[click.Parameter]:
        """``--config`` and one option for each setting, in order. With ``common``, those come first and the others are hidden.

        The options carry text. ``load`` converts and checks it, so a flag, a variable and a file give the same errors. The default
        here is None, "not given"; the help shows the real default.
        """
        config = click.Option(
            ["--config", CONFIG_PARAMETER],
            metavar="FILE",
            help=f'TOML file with these settings as keys, such as log_level = "debug".  [env: {_CONFIG_VARIABLE}]',
        )
        if not common:
            return [config, *map(_option, self.infos)]
        by_name = {info.name: info for info in self.infos}
        shown = [_option(by_name[name], has_variable=False) for name in common]
        return [*shown, config, *(_option(info, is_hidden=True) for info in self.infos if info.name not in common)]

    def load(
        self, flags: Mapping[str, Any], environment: Mapping[str, str], others: Callable[[], Collection[str]] = tuple
    ) -> T:
        """Make the settings from the command line, the environment, and the config file that either of them names.

        ``flags`` are click's parameters (not given: None, or () for a list). ``others``: variables of other commands, which are
        ignored here. Raises SettingsError that names the setting, the value, the limit and the source. A bad value is an error even
        if a stronger source overrides it.
        """
        given = {
            name: ",".join(value) if isinstance(value, tuple) else value  # an option that may be repeated
            for name, value in flags.items()
            if value not in (None, ()) and name != CONFIG_PARAMETER
        }
        # An empty variable means "not set": charts and compose files write empty variables for values that nobody set.
        variables = {name: text for name, text in environment.items() if name.startswith(_PREFIX) and text}
        config_file = flags.get(CONFIG_PARAMETER) or variables.get(_CONFIG_VARIABLE)
        from_file = _read_config(Path(config_file)) if config_file else {}
        from_environment = {
            info.name: variables.pop(info.variable) for info in self.infos if info.variable in variables
        }
        _check_unknown(variables, [info.variable for info in self.infos], others)
        merged: dict[str, Any] = {}
        for source, layer in (
            (str(config_file), from_file), ("environment", from_environment), ("command line", given)
        ):  # fmt: skip
            merged |= check(self.infos, layer, source=source)
        return self.make(merged)


def _check_unknown(variables: Collection[str], own: Collection[str], others: Callable[[], Collection[str]]) -> None:
    unknown = [name for name in variables if name != _CONFIG_VARIABLE and not name.startswith(_OF_TESTS)]
    if not unknown:
        return
    known = {*own, *others()}
    for name in sorted(set(unknown) - known):
        raise SettingsError(f"environment: {name} is no setting of any command; {closest(name, known)}")


def command_line(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Flags that pass ``values`` to a component with the settings class ``cls``. None values are left out.

    Raises SettingsError on a name that is not a setting of ``cls``.
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


def _negation(info: SettingInfo) -> str:
    return "--no-" + info.flag.removeprefix("--")


def _option(info: SettingInfo, *, has_variable: bool = True, is_hidden: bool = False) -> click.Option:
    help_text = _help(info, has_variable=has_variable)
    if info.kind is bool and not info.is_list:
        flags = [f"{info.flag}/{_negation(info)}", info.name]
        return click.Option(flags, default=None, help=help_text, hidden=is_hidden)
    if info.choices is not None:
        metavar = "|".join(info.choices)
    else:
        metavar = {str: "TEXT", int: "N", float: "X", bool: "BOOL"}[info.kind] + (",…" if info.is_list else "")
    return click.Option(
        [info.flag, info.name],
        default=None,
        metavar=metavar,
        help=help_text,
        multiple=info.is_list,
        hidden=is_hidden,
    )


def _help(info: SettingInfo, *, has_variable: bool) -> str:
    notes = [f"env: {info.variable}"] if has_variable else []
    if info.default is dataclasses.MISSING:
        notes.append("needed")
    elif info.default is not None and info.default != ():
        default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
        notes.append(f"default: {default}{f' {info.unit}' if info.unit else ''}")
    return f"{info.help}.  [{'; '.join(notes)}]" if notes else f"{info.help}."


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
