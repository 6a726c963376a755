"""API keys: who may send requests, and how many. The gateway knows only the keys' hashes.

The file has one line per key, ``NAME SHA256`` (hexadecimal; ``kvrelay api-key NAME`` makes both). Limits may follow on the line:
``requests_per_s=5``, ``burst=20``, ``concurrency=8``, ``tokens_per_minute=100000``, ``tokens_per_day=2000000``,
``min_priority=-10``. Tokens are counted over all gateways of a release (:mod:`kvrelay.gateway.routing.budgets`); each gateway
applies the other limits by itself. Where requests wait, keys share in proportion to their ``weight=2``
(:mod:`kvrelay.common.fair_queue`). ``operator=1`` makes an operator's key, which may use ``/debug/`` and add adapters. Blank lines
and text after ``#`` do not count.

A changed file is read again, so keys come and go without a restart. If the new file is broken, the error is logged, and the keys
read last stay in force.

A token bucket limits requests per second: ``burst`` requests may come at once, and the bucket fills at ``requests_per_s``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.clock import Clock
from kvrelay.common.errors import SettingsError
from kvrelay.common.fair_queue import MAX_PRIORITY, MAX_WEIGHT, MIN_PRIORITY, MIN_WEIGHT, Flow
from kvrelay.gateway.errors import TooManyRequestsError, UnauthorizedError
from kvrelay.gateway.routing.budgets import OtherGateways, TokenBudget
from kvrelay.wire.messages import KeyTokens

OPTIONS = (
    "requests_per_s",
    "burst",
    "concurrency",
    "tokens_per_minute",
    "tokens_per_day",
    "min_priority",
    "weight",
    "operator",
)
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_FRACTIONS = ("requests_per_s", "weight")
_BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key. Without limits a key may ask as often as it likes, and its requests wait in line like all others."""

    requests_per_s: float = math.inf
    burst: float = math.inf  # requests that may come at once
    concurrency: float = math.inf
    tokens_per_minute: float = math.inf
    tokens_per_day: float = math.inf
    min_priority: int = 0  # the smallest priority (served earliest) that a request gets, whatever it asks for
    weight: float = 1.0  # its share of the workers while requests of several keys wait
    operator: bool = False  # whether it may see workers and the requests of all keys

    @property
    def tokens(self) -> tuple[float, float]:
        """The token limits in the order of ``WINDOWS_S``, as :class:`TokenBudget` takes them."""
        return self.tokens_per_minute, self.tokens_per_day

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KeyLimits:
        """Limits from texts by name. Raises ValueError naming the wrong option; never quotes a value."""
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in OPTIONS:
                raise ValueError(f"an unknown option; known are {', '.join(OPTIONS)}")
            try:
                value = float(text) if name in _FRACTIONS else int(text)
            except ValueError:
                raise ValueError(f"{name} is not a number") from None
            if name != "min_priority" and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0")
            values[name] = value if name != "operator" else True
        if "burst" in values and "requests_per_s" not in values:
            raise ValueError("burst means nothing without requests_per_s")
        if "requests_per_s" in values:
            values.setdefault("burst", max(1.0, math.ceil(values["requests_per_s"])))
        limits = cls(**values)
        if Flow(priority=limits.min_priority).problem() is not None:
            raise ValueError(f"min_priority must be {MIN_PRIORITY} to {MAX_PRIORITY}")
        if Flow(weight=limits.weight).problem() is not None:
            raise ValueError(f"weight must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        return limits


class KeyUse:
    """How much of its limits one key uses now."""

    def __init__(self, budget: TokenBudget) -> None:
        self.budget = budget
        self.limits = KeyLimits()  # the limits when the last request entered
        self._num_running = 0
        self._filling = math.inf  # requests in the bucket, which starts full
        self._filled_s = 0.0  # when the bucket had that many

    def enter(self, limits: KeyLimits, now_s: float) -> None:
        """Begin a request; ``leave`` must follow. Raises TooManyRequestsError if the limits forbid it."""
        self.limits = limits
        if self._num_running >= limits.concurrency:
            raise TooManyRequestsError(
                f"this API key has {self._num_running} requests running, which is its limit",
                retry_after_s=_BUSY_RETRY_S,
            )
        if not math.isinf(limits.requests_per_s):
            self._filling, self._filled_s = self._filling_at(now_s), now_s
            if self._filling < 1:
                raise TooManyRequestsError(
                    f"this API key may ask {limits.requests_per_s:g} times a second, {limits.burst:g} at once",
                    retry_after_s=(1 - self._filling) / limits.requests_per_s,
                )
            self._filling -= 1
        self._num_running += 1

    def leave(self) -> None:
        """End a request."""
        self._num_running -= 1

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """The headers about limits, with OpenAI's names.

        If there are two token budgets, they describe the one with fewer tokens left.
        """
        limits, values = self.limits, dict[str, str]()
        if not math.isinf(limits.requests_per_s):
            filling = self._filling_at(now_s)
            values["limit-requests"], values["remaining-requests"] = f"{limits.burst:.0f}", f"{math.floor(filling)}"
            values["reset-requests"] = _duration((limits.burst - filling) / limits.requests_per_s)
        if (left := self.budget.left(limits.tokens, now_s)) is not None:
            values["limit-tokens"], values["remaining-tokens"] = f"{left.limit}", f"{left.num_tokens}"
            values["reset-tokens"] = _duration(left.reset_s)
        return [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in values.items()]

    def _filling_at(self, now_s: float) -> float:
        filled = self._filling + (now_s - self._filled_s) * self.limits.requests_per_s
        return min(self.limits.burst, filled)


def _duration(duration_s: float) -> str:
    """A duration as OpenAI writes it: 6m0s, or 120ms."""
    if duration_s < 1:
        return f"{math.ceil(duration_s * 1000)}ms"
    minutes, seconds = divmod(math.ceil(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


logger = logging.getLogger(__name__)

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<digest>[0-9a-f]{64})(?P<options>(\s+[a-z_]+=-?[0-9.]+)*)")
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Key:
    digest: str
    limits: KeyLimits


class ApiKeys:
    """The keys of one file. The constructor raises SettingsError if the file cannot be read."""

    def __init__(self, path: Path, clock: Clock, on_names: Callable[[Iterable[str]], object] = lambda _: None) -> None:
        """``on_names``: called with the names of all keys, now and when the file changes."""
        self._on_names = on_names
        self._gateway = secrets.token_hex(8)
        self._others = OtherGateways(self._gateway)
        self._num_told = 0
        self._path = path
        self._clock = clock
        self._version = version_of(path)
        self._take(_read(path))
        self._uses: dict[str, KeyUse] = {}  # by name; kept when the file changes
        self._looked_s = clock()

    def check(self, authorization: str | None, plain_key: str | None = None) -> str:
        """The name of the key in an ``Authorization: Bearer KEY`` header, or, without that header, of ``plain_key``.

        Raises UnauthorizedError.
        """
        self._look_again()
        scheme, _, key = (authorization or f"bearer {plain_key or ''}").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("no API key: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'")
        # The duration of a look-up by hash reveals nothing about a key: a client cannot choose the beginning of its key's
        # hash.
        name = self._names.get(hash_key(key.strip()))
        if name is None:
            raise UnauthorizedError("this API key is not known here")
        return name

    def enter(self, name: str) -> KeyUse:
        """Begin a request of a checked key. The caller must call ``leave`` on the result. Raises TooManyRequestsError."""
        use = self.use_of(name)
        use.enter(self._keys[name].limits, self._clock())
        return use

    def use_of(self, name: str) -> KeyUse:
        """The use of a key, also of one that was removed from the file."""
        if (use := self._uses.get(name)) is None:
            use = self._uses[name] = KeyUse(TokenBudget(name, self._others))
        return use

    def hear(self, told: KeyTokens) -> None:
        """Take in another gateway's report of what keys have used there."""
        self._others.hear(told, self._clock())

    def tell(self, send: Callable[[KeyTokens], bool]) -> None:
        """Report with ``send`` to the other gateways what keys have used here; does nothing if no key has a token budget.

        Call it every ``TELL_S``, also if nothing was used: the report tells the others that this gateway could let requests in.
        """
        if all(math.isinf(limit) for key in self._keys.values() for limit in key.limits.tokens):
            return
        now_s = self._clock()
        used = {name: tokens for name, use in self._uses.items() if max(tokens := use.budget.used(now_s))}
        self._num_told += 1
        if send(KeyTokens(gateway=self._gateway, number=self._num_told, used=used)):
            for use in self._uses.values():
                use.budget.on_told()

    def _take(self, keys: dict[str, _Key]) -> None:
        self._keys = keys
        self._names = {key.digest: name for name, key in reversed(keys.items())}
        self._on_names(keys)

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
    """The hash of a key, as the file has it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def version_of(*paths: Path) -> list[tuple[int, int, int] | None]:
    """A value that changes when the files do: Kubernetes replaces files, an editor may write into them.

    None stands for a missing file.
    """
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
    """The file's line for ``key`` and its ``name``. Raises SettingsError on a name that a line cannot have."""
    line = f"{name} {hash_key(key)}"
    if (match := _LINE.fullmatch(line)) is None or match["name"] != name:
        raise SettingsError(f"the key's name is {name!r}; it must be 1 to 64 letters, digits, '.', '_' or '-'")
    return line


def _read(path: Path) -> dict[str, _Key]:
    """The keys by name. An error never quotes a line, because the line may contain a key by mistake."""
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
