"""The form of a figure: measured value, floor, ratio, goals, and the peers of the same run."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Unit(enum.StrEnum):
    """The unit of a number."""

    SECONDS = "s"
    BYTES_PER_S = "bytes/s"
    FLOPS_PER_S = "FLOP/s"
    TOKENS_PER_S = "tokens/s"
    SHARE = "share"  # of 1

    def text(self, value: float) -> str:
        """``value`` for people."""
        size, form = _FORMS[self] if self is not Unit.SECONDS or value >= 1e-3 else (1e6, "{:.1f} µs")
        return form.format(value * size)


_FORMS = {
    Unit.SECONDS: (1e3, "{:.2f} ms"),
    Unit.BYTES_PER_S: (1e-9, "{:,.2f} GB/s"),
    Unit.FLOPS_PER_S: (1e-12, "{:,.1f} TFLOP/s"),
    Unit.TOKENS_PER_S: (1.0, "{:,.0f} tokens/s"),
    Unit.SHARE: (100.0, "{:.1f} %"),
}


class Against(enum.StrEnum):
    """What a goal compares."""

    VALUE = "value"
    FLOOR = "floor"  # measured / floor
    PEER = "peer"  # measured / the best peer


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal in words, and as a bound of the measured value or of a ratio."""

    text: str
    against: Against
    bound: float
    is_at_least: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's value in the same run, or the reason why there is none."""

    name: str
    value: float | None
    absence: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``value`` and ``floor`` are in base units: seconds, bytes per second."""

    figure: str
    unit: Unit
    value: float | None  # None: not measured, ``note`` says why
    floor: float | None = None  # for rates: the limit
    goals: tuple[Goal, ...] = ()
    peers: tuple[Peer, ...] = ()
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured / floor."""
        return None if self.value is None or not self.floor else self.value / self.floor

    @property
    def best_peer(self) -> Peer | None:
        """The fastest measured peer."""
        measured = [(peer.value, peer) for peer in self.peers if peer.value is not None]
        if not measured:
            return None
        best = min if self.unit is Unit.SECONDS else max
        return best(measured, key=lambda item: item[0])[1]

    def verdict(self, goal: Goal) -> str:
        """Whether the goal is met: "met", "missed", or what is missing."""
        if self.value is None:
            return "not measured"
        compared: float | None = self.value
        if goal.against is Against.FLOOR:
            compared = self.ratio
        elif goal.against is Against.PEER:
            peer = self.best_peer
            compared = None if peer is None or not peer.value else self.value / peer.value
        if compared is None:
            return f"no {goal.against}"
        is_met = compared >= goal.bound if goal.is_at_least else compared <= goal.bound
        return "met" if is_met else "missed"

    def document(self) -> dict[str, Any]:
        """The row for JSON."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "verdicts": {goal.text: self.verdict(goal) for goal in self.goals},
        }


class Kernel(enum.StrEnum):
    """A kernel, or the whole model. Norms, rotary embeddings and activations are checked only in the whole model."""

    DECODE = "decode attention"
    PREFILL = "prefill attention"
    BOXES = "prefill attention by TMA"
    FP8 = "attention over fp8 KV"
    LINEAR = "linears of one row, and with 8-bit weights"
    FP8_LINEAR = "linears of fp8 with fp8"
    STORED_LINEAR = "linears with 4-bit weights"
    EXPERTS = "experts"
    SAMPLING = "sampling"
    MODEL = "whole model"


@dataclass(frozen=True, slots=True)
class Checked:
    """A kernel's result against its reference, on fresh random numbers."""

    kernel: Kernel
    case: str
    error: float  # error by ``measure``; NaN counts as wrong
    limit: float
    measure: str = "relative error"

    @property
    def is_right(self) -> bool:
        """Whether the error is within its limit."""
        return self.error <= self.limit

    @property
    def text(self) -> str:
        """The check as one line."""
        word = "right" if self.is_right else "WRONG"
        return f"{self.kernel}, {self.case}: {word}, {self.measure} {self.error:.2e} (limit {self.limit:.1e})"


_HEAD = ("figure", "measured", "floor", "ratio", "to reach", "peers in the same run", "note")


def table(rows: Sequence[Row], *, has_verdicts: bool = True) -> str:
    """A Markdown table, aligned for terminals. Without verdicts for dry runs, whose times mean nothing."""
    cells = [_HEAD, *(_cells(row, has_verdicts=has_verdicts) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def absences(rows: Sequence[Row]) -> list[str]:
    """Missing peers with the reason, one line for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer in row.peers:
            if peer.value is None:
                found.setdefault((peer.name, peer.absence), []).append(row.figure)
    return [
        f"{name}: {absence} ({figures[0] if len(figures) == 1 else f'{len(figures)} figures'})"
        for (name, absence), figures in found.items()
    ]


def _cells(row: Row, *, has_verdicts: bool) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else row.unit.text(value)

    peers = [f"{peer.name} {'absent' if peer.value is None else number(peer.value)}" for peer in row.peers]
    goals = [f"{goal.text}: {row.verdict(goal)}" if has_verdicts else goal.text for goal in row.goals]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return (
        row.figure,
        number(row.value),
        number(row.floor),
        ratio,
        "; ".join(goals),
        "; ".join(peers),
        row.note,
    )
