"""Measures a figure in rounds: every side once per round, one after the other, while the others are paused.

The order alternates, so that a machine that gets slower favours no side. Failed sides are recorded, and the others continue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvrelay.launcher.bench.records import RunResult
from peers.figures import Figure, Results, Values
from peers.servers import ServerSide
from peers.trees import PeerError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one side in one round."""

    figure: str
    round: int
    side: str
    values: Values  # empty if it failed
    cpu_server: float  # cores
    cpu_others: float  # cores: neither the side nor the generator
    problem: str | None = None
    cpu_stolen: float = 0.0  # cores: what the hypervisor took
    lag_s: float = 0.0  # longest delay of the generator's event loop
    warnings: tuple[str, ...] = ()  # reasons to doubt the values

    @property
    def disturbance(self) -> float:
        """Cores that the benchmark did not use."""
        return self.cpu_others + self.cpu_stolen


@dataclass(slots=True)
class Stage:
    """The running sides. All are paused except the one whose turn it is. Leaving the context stops them all."""

    makers: Mapping[str, Callable[[], ServerSide]]
    say: Say
    _running: dict[str, ServerSide] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # by name: why it failed

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_error: object) -> None:
        self.keep(())

    def keep(self, names: Sequence[str]) -> None:
        """Stop all sides except ``names``, each of them even if another one fails to stop."""
        with ExitStack() as stack:
            for name in [name for name in self._running if name not in names]:
                stack.callback(self._running.pop(name).stop)

    def problem(self, name: str) -> str | None:
        """Why ``name`` is not running."""
        return self._dead.get(name)

    def bring(self, names: Sequence[str]) -> None:
        """Start the sides that do not run, one after the other, and pause them. Sides that failed before are tried again."""
        self._dead.clear()
        for name in names:
            if name in self._running:
                continue
            self.say(f"starting {name}")
            try:
                side = self.makers[name]()
                self._running[name] = side
                side.start()
                side.pause()
            except PeerError as error:
                self.fail(name, str(error))

    def side(self, name: str) -> ServerSide:
        """The running side ``name``."""
        return self._running[name]

    def fail(self, name: str, why: str) -> None:
        """Stop a side until the next ``bring``."""
        self._dead[name] = why
        self.say(f"{name} does not take part: {why}")
        side = self._running.pop(name, None)
        if side is not None:
            side.stop()


def run_figure(
    figure: Figure,
    stage: Stage,
    rounds: int,
    sides: Sequence[str],
    say: Say,
    on_results: Callable[[Sample, Results], None],
) -> list[Sample]:
    """All samples in the order of measurement. ``on_results`` gets each sample with its results."""
    stage.bring(sides)
    for name in sides:
        if stage.problem(name) is None:
            _turn(figure, stage, name, lambda side: _warm_up(figure, side))
    samples: list[Sample] = []
    for number in range(rounds):
        for name in sides if number % 2 == 0 else tuple(reversed(sides)):
            sample, results = _sample(figure, stage, number, name)
            on_results(sample, results)
            samples.append(sample)
            say(_line(sample, rounds))
    return samples


def _sample(figure: Figure, stage: Stage, number: int, name: str) -> tuple[Sample, Results]:
    results: dict[str, RunResult] = {}

    def measure(side: ServerSide) -> None:
        side.probe(new_seed())
        for load in figure.loads:
            results[load] = side.measure(figure.loads[load], new_seed())

    if stage.problem(name) is None:
        _turn(figure, stage, name, measure)
    problem = stage.problem(name) or _failures(results)
    cpus = [result.cpu for result in results.values() if result.cpu is not None]
    sample = Sample(
        figure=figure.name,
        round=number,
        side=name,
        values={} if problem else figure.values(results),
        cpu_server=max((cpu.server or 0.0 for cpu in cpus), default=0.0),
        cpu_others=max((cpu.others for cpu in cpus), default=0.0),
        problem=problem,
        cpu_stolen=max((cpu.stolen for cpu in cpus), default=0.0),
        lag_s=max((cpu.generator_max_lag_s for cpu in cpus), default=0.0),
        warnings=tuple(warning for result in results.values() for warning in result.warnings),
    )
    return sample, results


def new_seed() -> int:
    """A seed that is never used twice, so that no prompt is in a prefix cache."""
    return random.SystemRandom().randrange(2**31)


def _turn(figure: Figure, stage: Stage, name: str, act: Callable[[ServerSide], None]) -> None:
    """Resume one side for ``act``."""
    side = stage.side(name)
    side.resume()
    try:
        act(side)
    except PeerError as error:
        stage.fail(name, f"{figure.name}: {error}")
        return
    side.pause()


def _warm_up(figure: Figure, side: ServerSide) -> None:
    for load in [*figure.warm_up, *(load.warm_up for load in figure.loads.values())]:
        side.measure(load, new_seed())


def _failures(results: Mapping[str, RunResult]) -> str | None:
    for result in results.values():
        failed = [record for record in result.requests if record.error is not None]
        if failed:
            return f"{len(failed)} of {len(result.requests)} requests failed: {failed[0].error}: {failed[0].error_text}"
    return None


def _line(sample: Sample, rounds: int) -> str:
    what = sample.problem or ", ".join(f"{name} {value:.4g}" for name, value in sample.values.items())
    cores = f"it {sample.cpu_server:.2f}, others {sample.cpu_others:.2f}, stolen {sample.cpu_stolen:.2f}"
    text = f"{sample.figure} round {sample.round + 1}/{rounds} {sample.side}: {what} (cores: {cores})"
    return "\n".join([text, *(f"  doubtful: {warning}" for warning in sample.warnings)])
