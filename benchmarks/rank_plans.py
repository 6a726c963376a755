"""The cost of sending plans to ranks: tokens/s of a fake step of 10 ms on several ranks, compared with one rank.

    .venv/bin/python benchmarks/rank_plans.py [--ranks 2]

Plans, their encoding, links, rank processes and gloo are real. The step is fake: on each rank it takes 10 ms from the arrival of
its plan. In one case ranks wait for each other after 100 steps, which shows the cost of sending plans. In the other they wait after
each step, in a gloo collective; a real model has many of those anyway. One rank has neither. All cases take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine import factory, rank_main
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.ranks.messages import LoadSettings
from kvrelay.engine.settings import KvSettings, ModelSettings
from kvrelay.engine.step.interface import Engine, LaunchedStep, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan
from kvrelay.engine.step.sequence import Sequence

if TYPE_CHECKING:  # importing torch takes seconds, in which a rank must send heartbeats
    from kvrelay.engine.models.ranks import RankPart

_STEP_S = 0.010
_NUM_SEQS, _PROMPT = 16, 64  # number, and tokens of each prompt
_BLOCK_SIZE, _BLOCKS_EACH = 16, 160
_ROUNDS, _STEPS = 10, 100  # steps in one turn
_AS_RANK = "as-rank"


class _Computed:
    """A step that is complete at its launch, as on a CPU. Implements LaunchedStep."""

    is_deferred = False

    def __init__(self, results: list[RowResult]) -> None:
        self._results = results

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        raise AssertionError("it is sampled")

    def wait(self) -> list[RowResult]:
        """See LaunchedStep."""
        return self._results


class PacedPart(FakeEngine):
    """One rank's fake engine. All ranks meet at the end of a turn and, in every other turn, after each step."""

    def __init__(self, part: RankPart | None) -> None:
        """``part``: None for a single rank."""
        import torch  # noqa: PLC0415

        super().__init__(_card(), pace=FakePace(_STEP_S, 0.0), reads_back_once=True)
        # Unused: each rank's engine has its own K/V.
        self.blocks = torch.zeros((self.store.num_blocks, self.store.block_nbytes), dtype=torch.uint8)
        self.own_geometry = self.card.layout.geometry
        if part is not None and part.pool_memory is not None:
            os.ftruncate(part.pool_memory, self.blocks.nbytes)
        self._part = part
        self._num_steps = 0  # steps since the first, which computes prompts
        self._partial = torch.zeros(_NUM_SEQS)

    def encode(self, plan: StepPlan) -> None:
        """See TorchEngine: there are no images."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Engine."""
        results = super().launch(plan).wait()
        is_last, is_close = self._num_steps % _STEPS == 0, (self._num_steps - 1) // _STEPS % 2 == 1
        if self._part is not None and (is_last or is_close):
            self._part.collectives.sum(self._partial)
        self._num_steps += 1
        return _Computed(results)


def _card() -> ModelCard:
    return fake_card(num_blocks=_NUM_SEQS * _BLOCKS_EACH, block_size=_BLOCK_SIZE)


def _start_rank(environment: Mapping[str, str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Like kvrelay.engine.ranks.start, but runs this script."""
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), _AS_RANK, *map(str, descriptors)],
        env={**os.environ, **environment},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
    )


def ranked(num_ranks: int) -> Engine:
    """The real leader of ``num_ranks`` ranks, each with a PacedPart."""
    from kvrelay.engine.ranks import process  # noqa: PLC0415
    from kvrelay.engine.ranks.engine import RankedEngine  # noqa: PLC0415

    model = ModelSettings(model="fake", device="cpu", tensor_parallel=num_ranks)
    settings = LoadSettings(model, KvSettings(), _NUM_SEQS, None, decodes=True)
    load: Any = PacedPart
    with mock.patch.object(process, "start_rank", _start_rank):
        return RankedEngine.load(settings, lambda part, _: load(part), lambda done, total: None)


class Side:
    """Sequences that one engine decodes, with a token each per step."""

    def __init__(self, engine: Engine) -> None:
        self._leader = Leader(engine)
        self._rows = [_sequence(place) for place in range(_NUM_SEQS)]
        self._step(_PROMPT)

    def turn(self) -> float:
        """Tokens/s over one turn."""
        begun_s = time.perf_counter()
        for _ in range(_STEPS):
            self._step(1)
        return _STEPS * _NUM_SEQS / (time.perf_counter() - begun_s)

    def _step(self, num_tokens: int) -> None:
        for place, row in enumerate(self._rows):
            (table,) = row.block_tables
            while len(table) * _BLOCK_SIZE < row.num_computed_tokens + num_tokens:
                table.append(place * _BLOCKS_EACH + len(table))
        results = self._leader.step([StepRow(row, num_tokens) for row in self._rows])
        for row, result in zip(self._rows, results, strict=True):
            row.num_computed_tokens += num_tokens
            row.token_ids.append(result.tokens[0].token_id)


def _sequence(place: int) -> Sequence:
    sampling = SamplingParams(max_tokens=_BLOCKS_EACH * _BLOCK_SIZE, temperature=0.8, top_p=0.95, seed=place)
    tokens = [5 + (place + one) % 900 for one in range(_PROMPT)]
    return Sequence(f"s{place}", 1, tokens, _PROMPT, sampling, 0.0, block_tables=[[]])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", default=2, show_default=True, help="How many.")
def main(ranks: int) -> None:
    """Measure and print."""
    alone, loose, close = "1", f"{ranks}, which wait for each other behind 100 steps", f"{ranks}, behind each step"
    several = ranked(ranks)
    try:
        sides = {alone: Side(PacedPart(None)), loose: (together := Side(several)), close: together}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(_ROUNDS):
            for name in (alone, loose, close) if turn % 2 else (loose, close, alone):
                rates[name].append(sides[name].turn())
    finally:
        several.close()
    print("| ranks | tokens/s of 16 streams | a step | of one rank's tokens/s |")
    print("| --- | --- | --- | --- |")
    for name, its in rates.items():
        rate = statistics.median(its)
        ratios = sorted(more / one for more, one in zip(its, rates[alone], strict=True))
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {name} | {rate:.0f} | {_NUM_SEQS / rate * 1e3:.2f} ms | {spread} |")


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_RANK]:
        with mock.patch.object(factory, "load_part", lambda settings, part, progress: PacedPart(part)):
            rank_main.main(sys.argv[2:])
    main()
