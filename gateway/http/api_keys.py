"""Who may ask: API keys, known here by their hashes only.

The file has a line per key, ``NAME SHA256`` (hexadecimal; ``kvrelay api-key NAME`` makes both), and behind that, if the key
shall have limits, ``requests_per_s=5``, ``burst=20``, ``concurrency=8``, ``min_priority=-10`` or some of them. Limits hold for
each gateway by itself. ``operator=1`` makes it an operator's key, which may ask for ``/debug/``. Blank lines, and what stands
behind a ``#``, do not count. The file is looked at again when it has changed, so keys come and go without a restart; a file that is
broken then is reported, and the keys read last stay in force.
Requests a second are counted by a token bucket: ``burst`` requests may come at once, and the bucket fills at ``requests_per_s``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.clock import Clock
from kvrelay.common.errors import SettingsError
from kvrelay.gateway.errors import TooManyRequestsError, UnauthorizedError

OPTIONS = ("requests_per_s", "burst", "concurrency", "min_priority", "operator")
_BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of one key; without any, it may ask as often as it likes, and waits in line like everybody."""

    requests_per_s: float = math.inf
    burst: float = math.inf  # requests that may come at once
    concurrency: float = math.inf
    min_priority: int = 0  # a request that asks for a smaller one, to be served earlier, gets this one
    operator: bool = False  # whether it may look at workers and at everybody's requests

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KeyLimits:
        """From texts by name. Raises ValueError naming what is wrong; never quotes a value."""
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in OPTIONS:
                raise ValueError(f"an unknown option; known are {', '.join(OPTIONS)}")
            try:
                value = float(text) if name == "requests_per_s" else int(text)
            except ValueError:
                raise ValueError(f"{name} is not a number") from None
            if name != "min_priority" and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0")
            values[name] = value if name != "operator" else True
        if "burst" in values and "requests_per_s" not in values:
            raise ValueError("burst means nothing without requests_per_s")
        if "requests_per_s" in values:
            values.setdefault("burst", max(1.0, math.ceil(values["requests_per_s"])))
        return cls(**values)


class KeyUse:
    """How much of its limits one key uses now."""

    def __init__(self) -> None:
        self._num_running = 0
        self._filling = math.inf  # of the bucket, which starts full
        self._filled_s = 0.0  # when it was so full
        self.min_priority = 0  # of the limits that the last request entered by
        self.is_operator = False  # the same

    def enter(self, limits: KeyLimits, now_s: float) -> None:
        """A request begins; ``leave`` must follow. Raises TooManyRequestsError if it may not."""
        self.min_priority, self.is_operator = limits.min_priority, limits.operator
        if self._num_running >= limits.concurrency:
            raise TooManyRequestsError(
                f"this API key has {self._num_running} requests running, which is its limit",
                retry_after_s=_BUSY_RETRY_S,
            )
        if not math.isinf(limits.requests_per_s):
            filled = self._filling + (now_s - self._filled_s) * limits.requests_per_s
            self._filling, self._filled_s = min(limits.burst, filled), now_s
            if self._filling < 1:
                raise TooManyRequestsError(
                    f"this API key may ask {limits.requests_per_s:g} times a second, {limits.burst:g} at once",
                    retry_after_s=(1 - self._filling) / limits.requests_per_s,
                )
            self._filling -= 1
        self._num_running += 1

    def leave(self) -> None:
        """A request is over."""
        self._num_running -= 1


logger = logging.getLogger(__name__)

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<digest>[0-9a-f]{64})(?P<options>(\s+[a-z_]+=-?[0-9.]+)*)")
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Key:
    digest: str
    limits: KeyLimits


class ApiKeys:
    """The keys of one file. Raises SettingsError if it cannot be read at first."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._version = version_of(path)
        self._take(_read(path))
        self._uses: dict[str, KeyUse] = {}  # by name; what runs is counted on when the file changes
        self._looked_s = clock()

    def check(self, authorization: str | None) -> str:
        """The name of the key in an ``Authorization: Bearer KEY`` header. Raises UnauthorizedError."""
        self._look_again()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("no API key: send it as 'Authorization: Bearer KEY'")
        # How long a look-up by hash takes tells nothing about a key: nobody can choose what his key's hash begins with.
        name = self._names.get(hash_key(key.strip()))
        if name is None:
            raise UnauthorizedError("this API key is not known here")
        return name

    def enter(self, authorization: str | None) -> KeyUse:
        """A request begins; ``leave`` of what is returned must follow. Raises UnauthorizedError and TooManyRequestsError."""
        name = self.check(authorization)
        if (use := self._uses.get(name)) is None:
            use = self._uses[name] = KeyUse()
        use.enter(self._keys[name].limits, self._clock())
        return use

    def _take(self, keys: dict[str, _Key]) -> None:
        self._keys = keys
        self._names = {key.digest: name for name, key in reversed(keys.items())}

    def _look_again(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        version = version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._take(_read(self._path))
            logger.info("read %d API keys from %s", len(self._keys), self._path)
        except SettingsError as error:
            logger.error("%s; the keys read before stay in force", error)


def hash_key(key: str) -> str:
    """What the file has of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def version_of(*paths: Path) -> list[tuple[int, int, int] | None]:
    """Differs when the files do: Kubernetes replaces them, an editor may write into them. None: there is no such file."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return found


def line_of(name: str, key: str) -> str:
    """The line of the file that makes ``key`` known by ``name``. Raises SettingsError on a name that no line can have."""
    line = f"{name} {hash_key(key)}"
    if (match := _LINE.fullmatch(line)) is None or match["name"] != name:
        raise SettingsError(f"the key's name is {name!r}; it must be 1 to 64 letters, digits, '.', '_' or '-'")
    return line


def _read(path: Path) -> dict[str, _Key]:
    """Keys by name. The text of an error never has a line's content: somebody may have put a key there."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-keys: cannot read {path}: {error}") from error
    keys: dict[str, _Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise SettingsError(
                f"--api-keys: line {number} of {path} is not 'NAME SHA256' (kvrelay api-key NAME makes one), "
                f"with {', '.join(f'{name}=NUMBER' for name in OPTIONS)} behind it if there shall be limits or rights"
            )
        if match["name"] in keys:
            raise SettingsError(f"--api-keys: line {number} of {path} has the name {match['name']!r} a second time")
        try:
            limits = KeyLimits.parse(dict(option.split("=") for option in match["options"].split()))
        except ValueError as error:
            raise SettingsError(f"--api-keys: line {number} of {path}: {error}") from error
        keys[match["name"]] = _Key(match["digest"], limits)
    if not keys:
        raise SettingsError(
            f"--api-keys: {path} has no key, so nobody could ask anything; leave --api-keys out, or add one"
        )
    return keys
