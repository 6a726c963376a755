"""Parses short command line texts: times, lists of ``key=value``, distributions of lengths, ranges."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import closest

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_LENGTH = 10_000_000  # tokens; a larger number is a typing error
_MAX_ID = 2**31 - 1


def parse_time_s(text: str, flag: str) -> float:
    """Seconds of a text such as ``"5s"``, ``"100ms"`` or ``"2m"``, or of a plain number. Raises SettingsError."""
    number = text.strip()
    factor = 1.0
    for unit in sorted(_UNITS_S, key=len, reverse=True):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), _UNITS_S[unit]
            break
    try:
        value = float(number) * factor
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise SettingsError(f"{flag}: {text!r} is not a time; write 5s, 100ms or 2m")
    return value


def parse_pairs(text: str, flag: str, known: tuple[str, ...]) -> dict[str, str]:
    """Parse ``"a=1,b=2"`` into a dict. Raises SettingsError on a key that is unknown, repeated or has no value.

    A value may contain commas, as in ``input=normal:512,128``: a part without ``=`` belongs to the value before it.
    """
    pairs: dict[str, str] = {}
    last: str | None = None
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key, value = key.strip().replace("-", "_"), value.strip()
        if not equals and last is not None:
            pairs[last] += f",{part.strip()}"
            continue
        if not equals or not value:
            raise SettingsError(f"{flag}: {part.strip()!r} is not key=value; keys are {', '.join(known)}")
        if key not in known:
            raise SettingsError(f"{flag}: unknown key {key!r}; {closest(key, known)}")
        if key in pairs:
            raise SettingsError(f"{flag}: {key!r} is given twice")
        pairs[key] = value
        last = key
    return pairs


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens."""

    kind: str  # "fixed": a; "uniform": a to b, both included; "normal", "lognormal": mean a, standard deviation b
    a: float
    b: float = 0.0

    def draw(self, chooser: random.Random) -> int:
        """A random length of at least 1."""
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return chooser.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            value = chooser.gauss(self.a, self.b)
        else:
            # If a lognormal variable has mean m and deviation s, its logarithm has variance ln(1 + (s/m)²).
            variance = math.log1p((self.b / self.a) ** 2)
            value = chooser.lognormvariate(math.log(self.a) - variance / 2, math.sqrt(variance))
        return max(1, min(MAX_LENGTH, round(value)))


def parse_lengths(text: str, flag: str) -> Lengths:
    """``"128"``, ``"uniform:64-256"``, ``"normal:512,128"`` or ``"lognormal:512,128"``. Raises SettingsError."""
    kind, colon, rest = text.strip().partition(":")
    kind = kind.strip() if colon else "fixed"
    separators = {"fixed": None, "uniform": "-", "normal": ",", "lognormal": ","}
    numbers: list[float] = []
    if kind in separators:
        parts = [text] if kind == "fixed" else rest.split(separators[kind])
        try:
            numbers = [float(part) if kind in ("normal", "lognormal") else int(part) for part in parts]
        except ValueError:
            numbers = []
    if len(numbers) != (1 if kind == "fixed" else 2) or not all(map(math.isfinite, numbers)):
        raise SettingsError(
            f"{flag} is {text!r}; write a number of tokens, uniform:LOW-HIGH, normal:MEAN,DEVIATION "
            "or lognormal:MEAN,DEVIATION"
        )
    if not 1 <= numbers[0] <= MAX_LENGTH:
        raise SettingsError(f"{flag} is {text!r}; lengths are 1 to {MAX_LENGTH} tokens")
    if kind == "uniform" and not numbers[0] <= numbers[1] <= MAX_LENGTH:
        raise SettingsError(f"{flag} is {text!r}; HIGH must be between LOW and {MAX_LENGTH}")
    if numbers[-1] < 0:
        raise SettingsError(f"{flag} is {text!r}; a deviation is not negative")
    return Lengths(kind, *numbers)


def parse_id_range(text: str) -> range:
    """``--token-ids``, for example ``"1000-20000"``, as a range that includes both ends. Raises SettingsError."""
    low, _, high = text.partition("-")
    try:
        ids = range(int(low), int(high) + 1)
    except ValueError:
        ids = range(0)
    if not 0 <= ids.start < ids.stop - 1 <= _MAX_ID:
        raise SettingsError(f"--token-ids is {text!r}; write LOW-HIGH, for example 1000-20000")
    return ids


def parse_slo(text: str | None) -> dict[str, float]:
    """Parse ``"ttft=1s,itl=100ms,e2e=10s"`` into seconds by name. Raises SettingsError."""
    if text is None:
        return {}
    pairs = parse_pairs(text, "--slo", ("ttft", "itl", "e2e"))
    return {key: parse_time_s(value, f"--slo {key}") for key, value in pairs.items()}
