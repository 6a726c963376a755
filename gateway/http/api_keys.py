"""Who may ask: API keys, known here by their hashes only.

The file has a line per key, ``NAME SHA256`` (hexadecimal; ``kvrelay api-key NAME`` makes both), and behind that, if the key
shall have limits, ``requests_per_s=5``, ``burst=20``, ``concurrency=8``, ``tokens_per_minute=100000``, ``tokens_per_day=2000000``,
``min_priority=-10`` or some of them. Tokens are counted over all gateways of a release (:mod:`kvrelay.gateway.routing.budgets`);
the other limits hold for each gateway by itself. Where requests wait, keys share in proportion to their ``weight=2``
(:mod:`kvrelay.common.fair_queue`).
``operator=1`` makes it an operator's key, which may ask for ``/debug/`` and bring adapters. Blank lines, and what stands
behind a ``#``, do not count. The file is looked at again when it has changed, so keys come and go without a restart; a file that
is broken then is reported, and the keys read last stay in force.
Requests a second are counted by a token bucket: ``burst`` requests may come at once, and the bucket fills at ``requests_per_s``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.clock import Clock
from kvrelay.common.errors import SettingsError
from kvrelay.common.fair_queue import MAX_WEIGHT, MIN_WEIGHT, Flow
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
    """Of one key; without any, it may ask as often as it likes, and waits in line like everybody."""

    requests_per_s: float = math.inf
    burst: float = math.inf  # requests that may come at once
    concurrency: float = math.inf
    tokens_per_minute: float = math.inf
    tokens_per_day: float = math.inf
    min_priority: int = 0  # a request that asks for a smaller one, to be served earlier, gets this one
    weight: float = 1.0  # its share of the workers, where requests of several keys wait
    operator: bool = False  # whether it may look at workers and at everybody's requests

    @property
    def tokens(self) -> tuple[float, float]:
        """As :class:`TokenBudget` takes them."""
        return self.tokens_per_minute, self.tokens_per_day

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KeyLimits:
        """From texts by name. Raises ValueError naming what is wrong; never quotes a value."""
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
        if Flow(weight=limits.weight).problem() is not None:
            raise ValueError(f"weight must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        return limits


class KeyUse:
    """How much of its limits one key uses now."""

    def __init__(self, budget: TokenBudget) -> None:
        self.budget = budget
        self.limits = KeyLimits()  # that the last request entered by
        self._num_running = 0
        self._filling = math.inf  # of the bucket, which starts full
        self._filled_s = 0.0  # when it was so full

    def enter(self, limits: KeyLimits, now_s: float) -> None:
        """A request begins; ``leave`` must follow. Raises TooManyRequestsError if it may not."""
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
        """A request is over."""
        self._num_running -= 1

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """What an answer says of the limits, as OpenAI's do; of two token budgets, of the one that has less left."""
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
    """As OpenAI writes it: 6m0s, or 120ms."""
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
    """The keys of one file. Raises SettingsError if it cannot be read at first."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._gateway = secrets.token_hex(8)
        self._others = OtherGateways(self._gateway)
        self._num_told = 0
        self._path = path
        self._clock = clock
        self._version = version_of(path)
        self._take(_read(path))
        self._uses: dict[str, KeyUse] = {}  # by name; what runs is counted on when the file changes
        self._looked_s = clock()

    def check(self, authorization: str | None, plain_key: str | None = None) -> str:
        """The name of the key in an ``Authorization: Bearer KEY`` header, or, without that header, of ``plain_key``.

        Raises UnauthorizedError.
        """
        self._look_again()
        scheme, _, key = (authorization or f"bearer {plain_key or ''}").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("no API key: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'")
        # How long a look-up by hash takes tells nothing about a key: nobody can choose what his key's hash begins with.
        name = self._names.get(hash_key(key.strip()))
        if name is None:
            raise UnauthorizedError("this API key is not known here")
        return name

    def enter(self, name: str) -> KeyUse:
        """A request of a key that was checked begins; ``leave`` of what is returned must follow. Raises TooManyRequestsError."""
        use = self.use_of(name)
        use.enter(self._keys[name].limits, self._clock())
        return use

    def use_of(self, name: str) -> KeyUse:
        """What a key uses, whoever may come in by it now."""
        if (use := self._uses.get(name)) is None:
            use = self._uses[name] = KeyUse(TokenBudget(name, self._others))
        return use

    def hear(self, told: KeyTokens) -> None:
        """Another gateway tells what keys have used there."""
        self._others.hear(told, self._clock())

    def tell(self, send: Callable[[KeyTokens], bool]) -> None:
        """``send`` to the other gateways what keys have used here; nothing if no key has a budget of tokens.

        To be called every ``TELL_S``, also if nothing was used: others then know that somebody is here who could.
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
