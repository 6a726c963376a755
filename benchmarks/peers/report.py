"""Turns samples into medians, paired ratios and tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from peers.figures import Figure, Target, Values
from peers.rounds import Sample

_DISTURBANCE = ("others' cores, median (most)", "stolen cores", "generator late")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for a target."""

    target: Target
    side: str | None  # the better one of our sides; None if nothing could be compared
    value: float | None  # median of the ratios within each round (or of the metric itself)
    lowest: float | None
    highest: float | None

    @property
    def is_reached(self) -> bool | None:
        """None without a limit or a value."""
        return None if self.value is None else self.target.is_reached(self.value)


def medians(samples: Sequence[Sample], figure: str, side: str) -> Values:
    """The medians of one side's metrics over its successful rounds."""
    values = [item.values for item in samples if item.figure == figure and item.side == side and item.values]
    return {name: median(item[name] for item in values) for name in values[0]} if values else {}


def paired(samples: Sequence[Sample], figure: str, metric: str, ours: str, theirs: str | None) -> list[float]:
    """The ratio ours / theirs of every round in which both succeeded; ours itself without ``theirs``."""
    found: dict[tuple[int, str], float] = {
        (item.round, item.side): item.values[metric] for item in samples if item.figure == figure and item.values
    }
    rounds = sorted({number for number, side in found if side == ours})
    if theirs is None:
        return [found[number, ours] for number in rounds]
    return [found[number, ours] / found[number, theirs] for number in rounds if (number, theirs) in found]


def outcomes(samples: Sequence[Sample], figure: Figure) -> list[Outcome]:
    """The outcome of every target of a figure, with the better of our sides."""
    found: list[Outcome] = []
    for target in figure.targets:
        best = Outcome(target, None, None, None, None)
        for side in target.ours:
            ratios = paired(samples, figure.name, target.metric, side, target.theirs)
            if not ratios:
                continue
            middle = median(ratios)
            is_better = best.value is None or (middle < best.value if target.is_at_most else middle > best.value)
            if is_better:
                best = Outcome(target, side, middle, min(ratios), max(ratios))
        found.append(best)
    return found


def markdown(samples: Sequence[Sample], figures: Sequence[Figure], about: dict[str, str]) -> str:
    """The tables as markdown."""
    parts: list[str] = []
    for figure in figures:
        mine = [item for item in samples if item.figure == figure.name]
        if not mine:
            continue
        rounds = max(item.round for item in mine) + 1
        sides = list(dict.fromkeys(side for side in figure.sides if any(item.side == side for item in mine)))
        metrics = list(dict.fromkeys(name for item in mine for name in item.values))
        loads = "; ".join(load.words for load in figure.loads.values())
        parts += [f"### {figure.title}", "", f"`{figure.name}`: {loads}. Rounds: {rounds}; medians.", ""]
        parts += [
            _row("side", "what", *metrics, *_DISTURBANCE),
            _row(*["---"] * (len(metrics) + 2 + len(_DISTURBANCE))),
        ]
        for side in sides:
            values = medians(mine, figure.name, side)
            cells = [f"{values[name]:.4g}" if name in values else "-" for name in metrics]
            parts.append(_row(side, about[side], *cells, *_disturbance([item for item in mine if item.side == side])))
        problems = dict.fromkeys(f"{item.side}: {item.problem}" for item in mine if item.problem)
        parts += ["", *(f"- {' '.join(problem.split())[:300]}" for problem in problems)]
        parts += dict.fromkeys(f"- doubtful, {item.side}: {warning}" for item in mine for warning in item.warnings)
        parts += ["", _row("compared", "median (lowest to highest)", "to reach", "reached"), _row(*["---"] * 4)]
        parts += [_outcome_row(mine, figure, outcome) for outcome in outcomes(samples, figure)]
        parts.append("")
    return "\n".join(parts)


def _disturbance(samples: Sequence[Sample]) -> list[str]:
    """Cells for ``_DISTURBANCE``: cores of others and of the hypervisor, and the generator's lateness."""
    cores = [[item.cpu_others for item in samples], [item.cpu_stolen for item in samples]]
    late_ms = [item.lag_s * 1e3 for item in samples]
    return [
        *(f"{median(used):.2f} ({max(used):.2f})" for used in cores),
        f"{median(late_ms):.0f} ({max(late_ms):.0f}) ms",
    ]


def _outcome_row(samples: Sequence[Sample], figure: Figure, outcome: Outcome) -> str:
    target = outcome.target
    names = " or ".join(target.ours)
    what = f"{target.metric}: {names}" + (f" / {target.theirs}" if target.theirs else "")
    if outcome.value is None:
        return _row(what, "not measured", _limit(target), "-")
    value = f"**{outcome.value:.3g}** ({outcome.lowest:.3g} to {outcome.highest:.3g})"
    if len(target.ours) > 1:
        each = {side: paired(samples, figure.name, target.metric, side, target.theirs) for side in target.ours}
        value += "; " + ", ".join(f"{side} {median(ratios):.3g}" for side, ratios in each.items() if ratios)
    verdict = {True: "yes", False: "no", None: "-"}[outcome.is_reached]
    return _row(what, value, _limit(target), verdict)


def _limit(target: Target) -> str:
    return "printed" if target.limit is None else f"{'≤' if target.is_at_most else '≥'} {target.limit:g}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
