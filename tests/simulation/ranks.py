"""A worker of several ranks and stages in virtual time. Each rank is a process that may die or hang.

The cut, the fragments, the gathered store, the plans' messages and the scheduling of several steps at a time are real code. A rank
is a fake engine that writes and reads back only its own layers and heads. Stages compute a step at random moments, at the latest
when the leader waits for its tokens. A step that needs a lost rank ends only when the leader notices the loss. Workers exchange
whole blocks: the simulated network does not know ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup, Window
from kvrelay.common.model_card import ModelCard
from kvrelay.engine.config.cut import Cut, cuts_of
from kvrelay.engine.fake.engine import FakeEngine, KvMismatchError, fake_card
from kvrelay.engine.fake.step import FakeSequence
from kvrelay.engine.kv.fragments import own_nbytes, taken
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.ranks.messages import SILENT_S, Launch, ToRank
from kvrelay.engine.step.interface import DeviceFailedError
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan

from .clock import Process, ProcessState

_NUM_LAYERS = 4
_NUM_HEADS = 2
_TOKEN_NBYTES = 32  # of all layers of a group
_STAGE_S = 0.004  # what a stage takes for a step, at most
_NOTICE_S = 0.5  # a leader notices a dead rank within this time, and a hanging one after SILENT_S
_MOMENT_S = 1e-6

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """How many ranks a worker has."""

    num_ranks: int = 1  # of each stage
    num_stages: int = 1

    @property
    def others(self) -> range:
        """All ranks but the leader."""
        return range(1, self.num_ranks * self.num_stages)


def layered_card(*, num_blocks: int, block_size: int, vocab_size: int, windows: tuple[Window | None, ...]) -> ModelCard:
    """A fake engine's card whose K/V has layers and heads, so that it can be cut. Groups take the layers in turns."""
    card = fake_card(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, windows=windows)
    groups = []
    for number, window in enumerate(windows):
        layers = tuple(range(number, _NUM_LAYERS, len(windows)))
        size = _TOKEN_NBYTES // (len(layers) * _NUM_HEADS * 2)
        kind = GroupKind.FULL if window is None else GroupKind.WINDOW
        groups.append(
            KvGroup(
                kind=kind, window=window, layers=layers, num_kv_heads=_NUM_HEADS, key_size=size, value_size=size,
                dtype="uint8",
            )
        )  # fmt: skip
    layout = msgspec.structs.replace(card.layout, geometry=KvGeometry(groups=tuple(groups), block_size=block_size))
    return msgspec.structs.replace(card, layout=layout)


class PartEngine(FakeEngine):
    """The engine of one rank. It keeps only the rank's own bytes of each block."""

    def __init__(self, card: ModelCard, cut: Cut) -> None:
        super().__init__(card)
        geometry = card.layout.geometry
        self._block_size = geometry.block_size
        self.own: Bytes = np.zeros((self.store.num_blocks, own_nbytes(geometry, cut)), dtype=np.uint8)
        # By group: the place of each byte of a whole block in the rank's own bytes; -1 if another rank has it.
        self._places = [np.full(geometry.physical_nbytes, -1, dtype=np.int64) for _ in geometry.groups]
        for group, places in enumerate(self._places):
            for one in taken(geometry, cut, group):
                places[one.start : one.start + one.nbytes] = np.arange(one.own_start, one.own_start + one.nbytes)

    def _slice(self, sequence: FakeSequence, first: int, last: int, group: int) -> Any:
        return _OwnBytes(*self._piece(sequence, first, last, group))

    def _compare(self, sequence: FakeSequence, start: int, end: int, group: int) -> None:
        for first, last in self._spans(start, end):
            own, places = self._piece(sequence, first, last, group)
            expected = np.frombuffer(self._kv(sequence.memory, first, last, group), dtype=np.uint8)
            if not np.array_equal(own[places[places >= 0]], expected[places >= 0]):
                raise KvMismatchError(f"{sequence.name}: K/V of {first} to {last} in group {group} is not its tokens'")

    def _piece(self, sequence: FakeSequence, first: int, last: int, group: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
        index, offset = divmod(first, self._block_size)
        start = offset * self._token_nbytes
        places = self._places[group][start : start + (last - first) * self._token_nbytes]
        return self.own[sequence.block_tables[group][index]], places


@dataclass(frozen=True)
class _OwnBytes:
    """A slice of some positions to which a fake engine writes; the rank stores only its own bytes."""

    own: Bytes
    places: npt.NDArray[np.int64]

    def __setitem__(self, everything: slice, data: bytes) -> None:
        self.own[self.places[self.places >= 0]] = np.frombuffer(data, dtype=np.uint8)[self.places >= 0]


@dataclass(eq=False)
class _Rank:
    cut: Cut
    engine: PartEngine
    process: Process
    plans: list[bytes] = field(default_factory=list)  # all plans that it was sent
    num_computed: int = 0  # steps


class SimStep:
    """Implements LaunchedStep."""

    is_deferred = False

    def __init__(self, engine: RankedSimEngine, number: int) -> None:
        self._engine = engine
        self._number = number

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        raise AssertionError("a step of several ranks is sampled as it comes")

    def wait(self) -> list[RowResult]:
        """See LaunchedStep."""
        return self._engine.results(self._number)


class RankedSimEngine:
    """Implements Engine: the leader's view of all ranks. Rank 0 is in the leader's process."""

    adapters = None
    runs_ahead = False

    def __init__(self, card: ModelCard, shape: Shape, leader: Process) -> None:
        self.card = card
        self.num_stages = shape.num_stages
        self.lost: str | None = None
        self._hears_s = math.inf  # when the leader notices the first lost rank
        self._loop = leader.loop
        self._leader = leader
        self._ranks = [
            _Rank(
                cut,
                PartEngine(card, cut),
                leader if cut.number == 0 else Process(f"{leader.name}/{cut.number}", leader.loop),
            )
            for cut in cuts_of(shape.num_ranks, shape.num_stages)
        ]
        self.num_slots = self._ranks[0].engine.num_slots
        geometry = card.layout.geometry
        parts = [HostPart(rank.engine.own) for rank in self._ranks]
        self.store = GatheredStore(geometry, card.num_blocks * len(geometry.groups), parts, shape.num_stages)
        self._results: list[list[RowResult]] = []  # by step, from the last stage
        self.num_launched = 0
        self.most_at_once = 0  # most steps under way at a time

    def launch(self, plan: StepPlan) -> SimStep:
        """See Engine."""
        self.check_device()
        message = msgspec.msgpack.encode(Launch(plan))
        for rank in self._ranks:
            rank.plans.append(message)
        number, self.num_launched = self.num_launched, self.num_launched + 1
        self.most_at_once = max(self.most_at_once, number + 1 - len(self._results))
        if not self._run_stage(0):  # the first stage waits for its ranks in a collective
            self._fail()
        self._soon(1)
        return SimStep(self, number)

    def results(self, number: int) -> list[RowResult]:
        """The results of a step. Raises DeviceFailedError if the step needs a lost rank."""
        while len(self._results) <= number:
            if not any(map(self._run_stage, range(self.num_stages))):
                self._fail()
        return self._results[number]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Engine."""
        raise AssertionError("nobody searches with beams in a world with ranks")

    def check_device(self) -> None:
        """See Engine."""
        if self.lost is not None:
            raise DeviceFailedError(self.lost)

    def not_live(self) -> list[str]:
        """See Engine."""
        return [] if self.lost is None else [self.lost]

    def close(self) -> None:
        """See Engine. Ranks end with their leader."""
        for rank in self._ranks[1:]:
            rank.process.kill()

    def kill(self, *numbers: int) -> None:
        """SIGKILL of these ranks. The leader notices it a little later."""
        for number in numbers:
            self._ranks[number].process.kill()
        self._hear(self._loop.random.uniform(0, _NOTICE_S))

    def hang(self, *numbers: int) -> None:
        """SIGSTOP of these ranks. The leader takes them for lost after ``SILENT_S``."""
        for number in numbers:
            self._ranks[number].process.stop()
        self._hear(SILENT_S)

    def _hear(self, delay_s: float) -> None:
        self._hears_s = min(self._hears_s, self._loop.now_s + delay_s)
        self._loop.call_at(self._hears_s, self._lose, context=self._leader.context)

    def _lose(self) -> None:
        gone = [rank.cut.number for rank in self._ranks[1:] if rank.process.state is not ProcessState.RUNNING]
        self.lost = self.lost or f"rank {gone[0]} is gone"

    def _fail(self) -> NoReturn:
        """The step waits until the leader notices the lost rank, and fails."""
        assert self._hears_s < math.inf, "a step does not end, and all ranks are there"
        self._leader.ahead_s = max(self._leader.ahead_s, self._hears_s - self._loop.now_s + _MOMENT_S)
        raise DeviceFailedError("the step waited for a rank that is gone")

    def _soon(self, stage: int) -> None:
        """After a random delay the stage computes its next step if it can."""
        if stage < self.num_stages:
            process = next(rank.process for rank in self._ranks if rank.cut.stage == stage)
            when_s = self._loop.now_s + self._loop.random.uniform(0, _STAGE_S)
            self._loop.call_at(when_s, self._advance, stage, context=process.context)

    def _advance(self, stage: int) -> None:
        if self._run_stage(stage):
            self._soon(stage + 1)

    def _run_stage(self, stage: int) -> bool:
        """Compute the stage's next step if the stage before has computed it and all ranks of this stage run."""
        ranks = [rank for rank in self._ranks if rank.cut.stage == stage]
        in_front = [rank for rank in self._ranks if rank.cut.stage == stage - 1]
        number = ranks[0].num_computed
        if number == len(ranks[0].plans) or any(rank.num_computed <= number for rank in in_front):
            return False
        if any(rank.process.state is not ProcessState.RUNNING for rank in ranks):
            return False
        for rank in ranks:
            launch = msgspec.msgpack.decode(rank.plans[number], type=ToRank)
            assert isinstance(launch, Launch)
            results = rank.engine.launch(launch.plan).wait()
            rank.num_computed += 1
            if rank.cut.is_last and rank.cut.rank == 0:
                self._results.append(results)
        return True
