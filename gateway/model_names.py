"""Parses the settings that name models: ``NAME=MODEL``, ``ALIAS=MODEL:WEIGHT+MODEL:WEIGHT``, ``MODEL=tcp://HOST:PORT`` and
``MODEL=DIRECTORY``. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import closest

_ADDRESS = re.compile(
    r"((?P<model>[^\s=]+)=)?(?P<address>tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})|(ipc|inproc)://\S+)"
)
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._:/-]*)=(?P<rest>.+)")
_SHARE = re.compile(r"(?P<model>.+):(?P<weight>[0-9]+(\.[0-9]+)?)")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # a valid value of a Kubernetes label


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One value of ``--model``."""

    name: str  # in the API; "": the directory's name
    path: str  # a model's public name, or a directory

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse ``NAME=MODEL`` or ``MODEL``. Write ./ before a path that contains a =."""
        match = _NAMED.fullmatch(text)
        return cls("", text) if match is None else cls(match["name"], match["rest"])


@dataclass(frozen=True, slots=True)
class Alias:
    """One value of ``--alias``: another name for a model, or for several models that share the conversations."""

    name: str
    weights: tuple[tuple[str, float], ...]  # names of models with weights; one or more

    @classmethod
    def of(cls, text: str, models: Collection[str]) -> Self:
        """Parse an alias. Raises SettingsError if it is malformed, or names a model that is not among ``models``."""
        match = _NAMED.fullmatch(text)
        if match is None:
            raise SettingsError(f"--alias: {text!r} is no alias; write ALIAS=MODEL, or ALIAS=MODEL:WEIGHT+MODEL:WEIGHT")
        name, target = match["name"], match["rest"]
        if name in models:
            raise SettingsError(f"--alias: {name!r} is the name of a model; choose another one for {text!r}")
        if target in models:
            return cls(name, ((target, 1.0),))
        shares = [_SHARE.fullmatch(part) for part in target.split("+")]
        weights = [(share["model"], float(share["weight"])) for share in shares if share is not None]
        if len(weights) < len(shares) or len(shares) == 1:
            raise SettingsError(
                f"--alias: {target!r} of {name!r} is no model, nor MODEL:WEIGHT+MODEL:WEIGHT; {closest(target, models)}"
            )
        for model, _ in weights:
            if model not in models:
                raise SettingsError(
                    f"--alias: {name!r} has a part for {model!r}, which is no model; {closest(model, models)}"
                )
        if not any(weight for _, weight in weights):
            raise SettingsError(f"--alias: the weights of {name!r} are all 0; give one model a part")
        return cls(name, tuple(weights))


def adapters_directory(text: str) -> tuple[str, str]:
    """The model ("": the only one) and the directory of one value of ``--adapters``.

    A path that contains a = must begin with / or ./
    """
    match = _NAMED.fullmatch(text)
    return ("", text) if match is None else (match["name"], match["rest"])


def worker_address(text: str) -> tuple[str, str]:
    """The model ("": the only one) and the checked address of one value of ``--prefill-workers`` or ``--decode-workers``."""
    match = _ADDRESS.fullmatch(text)
    return ("", text) if match is None else (match["model"] or "", match["address"])


def is_address(text: str) -> bool:
    """Whether a worker can have this address."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and (match["port"] is None or 1 <= int(match["port"]) <= 65535)


def is_label(name: str) -> bool:
    """Whether a model's name can be the value of a Kubernetes label."""
    return _LABEL.fullmatch(name) is not None
