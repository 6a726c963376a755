"""Two pools of workers compared with workers that do both, on the same cores: loads, figures and the table of `split.py`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvrelay.launcher.bench.records import RunResult
from kvrelay.launcher.bench.summary import percentile
from peers.figures import LOADED, Figure, Load, Results, Values, gaps_of_streams

POOLS = "1 prefill + 1 decode"
ONE_OF_BOTH = "--prefill 0"  # one worker with all cores
ONE_EACH = "--prefill 0 --decode 2"  # as many workers as both pools have, with a core each
WAYS = (POOLS, ONE_OF_BOTH, ONE_EACH)

_COLUMNS = ("load", "budget", "workers", "TTFT p50", "p99 gap", "whole run", "refused", "others' cores")
_RATIOS = ("load", "budget", "TTFT p50", "p99 gap", "whole run")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients. Each sends its next request after its last answer. Lengths are log-normal around the means."""

    num_clients: int
    num_requests: int
    prompt_len: int  # tokens, the mean
    output_len: int
    spread: float = 0.25  # standard deviation of the lengths over their mean

    @property
    def name(self) -> str:
        """The name for ``--load``."""
        return f"{self.num_clients}x{self.prompt_len}"

    def scaled(self, scale: float) -> ClosedLoop:
        """Fewer and shorter requests, to try the script."""
        num_requests = max(1, round(self.num_requests * scale))
        return ClosedLoop(
            min(self.num_clients, num_requests),
            num_requests,
            max(8, round(self.prompt_len * scale)),
            max(4, round(self.output_len * scale)),
            self.spread,
        )

    @property
    def load(self) -> Load:
        """The load for `kvrelay bench`."""
        prompt, output = (f"lognormal:{mean},{mean * self.spread:g}" for mean in (self.prompt_len, self.output_len))
        return Load(self.num_clients, prompt, output, requests=self.num_requests)

    @property
    def figure(self) -> Figure:
        """The figure for ``run_figure``."""
        return Figure(self.name, self.load.words, WAYS, {LOADED: self.load}, _values, ())


LOOPS = (
    ClosedLoop(16, 64, 400, 100),
    ClosedLoop(64, 192, 300, 60),
    ClosedLoop(8, 24, 3000, 60),
    ClosedLoop(4, 8, 7000, 64, spread=0.05),  # the demo model takes 8,192 tokens
)


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one run, or medians of several."""

    ttft_p50_s: float
    gap_p99_s: float
    run_s: float
    num_refused: float  # requests without a whole answer
    cpu_others: float = 0.0  # cores used neither by workers nor by the generator

    @classmethod
    def of(cls, run: RunResult) -> Point | None:
        """None if there was no answer."""
        answered = [record for record in run.requests if record.error is None]
        if not answered:
            return None
        gaps = sorted(gap for _, gap in gaps_of_streams(run, 0.0, float("inf")))
        return cls(
            ttft_p50_s=median(record.chunk_s[0] - record.sent_s for record in answered),
            gap_p99_s=percentile(gaps, 0.99) if gaps else 0.0,
            run_s=max(record.finished_s for record in run.requests) - min(record.sent_s for record in run.requests),
            num_refused=len(run.requests) - len(answered),
            cpu_others=0.0 if run.cpu is None else run.cpu.others + run.cpu.stolen,
        )

    @classmethod
    def middle(cls, points: Sequence[Point]) -> Point:
        """The median of each value."""
        return cls(
            median(point.ttft_p50_s for point in points),
            median(point.gap_p99_s for point in points),
            median(point.run_s for point in points),
            median(point.num_refused for point in points),
            median(point.cpu_others for point in points),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    loop: str
    budget: str  # "auto", "none" or milliseconds
    way: str


def _values(results: Results) -> Values:
    """The values on a round's line. The table also includes rounds with failed requests."""
    point = Point.of(results[LOADED])
    if point is None:
        return {}
    return {"ttft_p50_s": point.ttft_p50_s, "gap_p99_s": point.gap_p99_s, "run_s": point.run_s}


Points = Mapping[Case, Sequence[Point | None]]  # one for each round; None: the whole round failed


def table(points: Points) -> str:
    """The medians as markdown, and below them the medians of the ratios within rounds."""
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    for case, found in points.items():
        rounds = [point for point in found if point is not None]
        cells = ["-"] * 5
        if rounds:
            middle = Point.middle(rounds)
            cells = [
                f"{middle.ttft_p50_s:.2f} s",
                f"{middle.gap_p99_s * 1e3:.0f} ms",
                f"{middle.run_s:.1f} s",
                f"{middle.num_refused:g}",
                f"{middle.cpu_others:.2f}",
            ]
        lines.append(_row([case.loop, case.budget, f"`{case.way}`", *cells]))
    for other in WAYS[1:]:
        lines += ["", f"`{POOLS}` over `{other}`, medians of the ratios within the rounds:", ""]
        lines += [_row(_RATIOS), _row(["---"] * len(_RATIOS))]
        for case in [case for case in points if case.way == POOLS]:
            ratios = paired(points[case], points.get(Case(case.loop, case.budget, other), ()))
            cells = ["-"] * 3 if ratios is None else [f"{ratio:.2f}" for ratio in ratios]
            lines.append(_row([case.loop, case.budget, *cells]))
    return "\n".join(lines)


def paired(ours: Sequence[Point | None], theirs: Sequence[Point | None]) -> tuple[float, float, float] | None:
    """Median ratios of TTFT p50, p99 gap and whole run over the rounds in which both succeeded; None without such a round."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=False) if one is not None and other is not None]
    if not pairs:
        return None
    return (
        median(one.ttft_p50_s / other.ttft_p50_s for one, other in pairs),
        median(one.gap_p99_s / other.gap_p99_s for one, other in pairs),
        median(one.run_s / other.run_s for one, other in pairs),
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
