"""An engine of several ranks: the leader's part is in this process, the others' in theirs, and each step runs on all of them.

    leader   launch ─▶ plan to all ranks ─▶ its own part of the step ─▶ results
    ranks              plan ─▶ their parts of the step, the same tokens, which are not collected

With several stages, the last one has the tokens and sends them (:mod:`kvrelay.engine.ranks.stages`).

Ranks get plans in the order in which the engine got them, so they hold the same slots and enter the same collectives. An action
must succeed on all ranks or on none: a rank that fails says so and waits for the same message from the others. If a step fails on
all ranks because of its input, only the step fails. Any other failure ends the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import ModelCard
from kvrelay.engine.backends.options import device_of
from kvrelay.engine.config.cut import Cut, cuts_of
from kvrelay.engine.kv.device.copies import CudaCopies
from kvrelay.engine.kv.division import division_of
from kvrelay.engine.kv.fragments import own_nbytes
from kvrelay.engine.kv.gathered import GatheredStore, HostPart, Part
from kvrelay.engine.load_progress import OthersProgress
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.ranks.adapters import RankedAdapters
from kvrelay.engine.ranks.blocks import OwnBlocks
from kvrelay.engine.ranks.door import Door
from kvrelay.engine.ranks.group import Meeting, RankGroup
from kvrelay.engine.ranks.head import RankedHead
from kvrelay.engine.ranks.loading import OwnLoad, Progress, unless_lost, wait_for_reason
from kvrelay.engine.ranks.messages import (
    AGREE_S,
    LOAD_S,
    TOGETHER_S,
    Copy,
    Draft,
    Failed,
    Go,
    Launch,
    Load,
    Loaded,
    LoadSettings,
    Ready,
    Sample,
    Stepped,
    Welcome,
    may_be_theirs,
)
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.ranks.process import RankProcess
from kvrelay.engine.ranks.profile import RankedProfiler
from kvrelay.engine.ranks.rank import Rank
from kvrelay.engine.ranks.remote import RemoteRank
from kvrelay.engine.ranks.stages import StagedStep
from kvrelay.engine.step.interface import (
    AdapterSlots,
    BlockStore,
    DeviceFailedError,
    DraftHead,
    LaunchedStep,
    Profiler,
)
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan
from kvrelay.engine.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ranks:
    """All ranks except the leader's. If one is lost, all are."""

    def __init__(self, num_ranks: int, nodes: OtherNodes | None = None) -> None:
        """Waits for the ranks of other ``nodes``, then starts those of this host.

        Raises ModelError or SettingsError if it cannot.
        """
        self._lost: list[Rank] = []  # the first is the cause; the others are killed because of it
        self.others: list[Rank] = []
        try:
            remote = [] if nodes is None else self._come_in(nodes)
            self.num_local = num_ranks - len(remote)
            self._meeting = Meeting.open(num_ranks, self.num_local, *(one.own_host for one in remote[:1]))
            for rank in range(1, self.num_local):
                self.others.append(RankProcess(rank, self._meeting.environment(rank), self._lose))
            self.others.sort(key=lambda one: one.rank)
            welcome = msgspec.msgpack.encode(Welcome(self._meeting.port))
            for one in remote:
                one.send(welcome)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> list[str]:
        """Why the ranks are lost; empty if they are not."""
        return [rank.lost for rank in self._lost[:1] if rank.lost is not None]

    @property
    def why_lost(self) -> str | None:
        """The reason in ``lost``, if there is one."""
        return next(iter(self.lost), None)

    def tell(self, message: Any) -> None:
        """Send a message to all ranks."""
        encoded = msgspec.msgpack.encode(message)
        for rank in self.others:
            rank.send(encoded)

    def join(self, settings: LoadSettings) -> RankGroup:
        """Make the ranks load, and join their group. Raises ModelError if one cannot."""
        self.tell(Load(settings))
        self.meet()
        (own, *_) = cuts_of(settings.model.tensor_parallel, settings.model.pipeline_parallel)
        return self._meeting.join(device_of(settings.model.device), own)

    def meet(self, told: bytes = b"") -> bytes:
        """See :class:`kvrelay.engine.models.ranks.Meet`."""
        self._expect(Ready)
        self.tell(Go(told))
        return told

    def cards(self) -> list[ModelCard]:
        """The ranks' model cards, once they have loaded. Raises ModelError if one could not load."""
        return [loaded.card for loaded in self._expect(Loaded)]

    def agree_on_failure(self, reason: str) -> bool:
        """This process failed at what it told the ranks to do, for ``reason``. Returns whether all of them failed, too."""
        self.tell(Failed())
        end_s = time.monotonic() + AGREE_S
        silent = [one for one in self.others if not isinstance(one.take(max(0.0, end_s - time.monotonic())), Failed)]
        if silent:
            # Other ranks may wait for this process in a collective that it has not entered.
            last = min(silent, key=lambda rank: rank.num_meetings)
            last.lose(f"is not where its leader is, which failed: {reason}")
        return not silent

    def results(self, rank: int, timeout_s: float) -> Stepped:
        """What ``rank`` reports about the next step. Raises DeviceFailedError if a rank is lost, or is silent for ``timeout_s``."""
        teller = self.others[rank - 1]
        if not self.lost and (stepped := teller.take_results(timeout_s)) is not None:
            return stepped
        if not self.lost:
            teller.lose(f"has told no tokens of a step for {timeout_s:g} s: it hangs, or waits for one that does")
        raise DeviceFailedError(self.lost[0])

    def close(self) -> None:
        """End the ranks, and wait for their end."""
        for rank in self.others:
            rank.close()

    def kill(self) -> None:
        """End the ranks at once. ``close`` them afterwards."""
        for rank in self.others:
            rank.kill()

    def _come_in(self, nodes: OtherNodes) -> list[RemoteRank]:
        host, port = nodes.place.leader
        logger.info("waiting for ranks of %d other nodes at %s:%d", nodes.place.num_nodes - 1, host, port)
        door = Door(nodes)
        try:
            arrived = door.wait(LOAD_S)
        finally:
            door.close()
        remote = [RemoteRank(one, self._lose, nodes.on_leaving) for one in arrived]
        self.others += remote
        return remote

    def _lose(self, lost: Rank) -> None:
        self._lost.append(lost)
        self.kill()

    def _expect(self, kind: type[T]) -> list[T]:
        told: list[T] = []
        for rank in self.others:
            match rank.take_while_reading(LOAD_S):
                case None if rank.lost is None:
                    rank.lose(f"has not loaded {LOAD_S:g} s after its leader: it hangs")
                    raise ModelError(self.lost[0])
                case kind() as one:
                    told.append(one)
                case other:
                    raise ModelError(self.why_lost or f"rank {rank.rank} says {other}")
        return told


class RankedEngine:
    """Implements :class:`kvrelay.engine.step.interface.Engine`."""

    def __init__(self, own: TorchEngine, ranks: Ranks, group: RankGroup, store: BlockStore, last: Cut) -> None:
        """``own``: the leader's part. Takes over all arguments. ``last``: the last rank's cut."""
        self._own = own
        self._num_stages = last.num_stages
        self._first_of_last = last.number - last.rank  # this rank of the last stage reports the sampled tokens
        self._ranks = ranks
        self._group = group
        self._store = store
        self._adapters = None if own.adapters is None else RankedAdapters(own.adapters, ranks.others)
        self._profiler = RankedProfiler(own.profiler, ranks.tell)

    @classmethod
    def load(
        cls,
        settings: LoadSettings,
        load_part: Callable[[RankPart, Progress], TorchEngine],
        progress: Progress,
        nodes: OtherNodes | None = None,
    ) -> RankedEngine:
        """``load_part`` loads this process's part, on another thread. It reports its progress, and so does this to ``progress``.

        Raises ModelError at once if a rank cannot join or load. Then ``load_part`` may go on for a while.
        """
        ranks = Ranks(settings.model.num_ranks, nodes)
        heard = unless_lost(progress, lambda: ranks.why_lost)
        others = OthersProgress(logger, time.monotonic)
        own = OwnLoad(lambda: cls._load(settings, ranks, load_part, heard), lambda: ranks.why_lost)
        try:
            return own.wait(lambda: others({rank.rank: rank.share_read for rank in ranks.others}))
        except BaseException:  # also an interrupt
            ranks.kill()
            raise

    @classmethod
    def _load(
        cls,
        settings: LoadSettings,
        ranks: Ranks,
        load_part: Callable[[RankPart, Progress], TorchEngine],
        progress: Progress,
    ) -> RankedEngine:
        """The engine of ``ranks``, which this closes if it fails."""
        cuts, group = cuts_of(settings.model.tensor_parallel, settings.model.pipeline_parallel), None
        try:
            group = ranks.join(settings)
            own = load_part(RankPart(cuts[0], group, ranks.meet, ranks.num_local, line=group), progress)
            for card in ranks.cards():
                # Only the leader reads images, or knows why not.
                if msgspec.structs.replace(card, no_images=own.card.no_images) != own.card:
                    raise ModelError(f"a rank has loaded {card}, its leader {own.card}: all nodes need the same model")
            geometry = own.card.layout.geometry
            num_blocks, num_stages = own.card.num_blocks * len(geometry.groups), settings.model.pipeline_parallel
            division = division_of(geometry, own.own_geometry, own.divided_states)
            parts = _parts(own.blocks, ranks, [own_nbytes(geometry, cut, division) for cut in cuts[1:]])
            store = GatheredStore(geometry, num_blocks, parts, num_stages, division)
            return cls(own, ranks, group, store, cuts[-1])
        except BaseException as error:
            reason = wait_for_reason(lambda: ranks.why_lost, AGREE_S) if may_be_theirs(error) else None
            ranks.close()
            if group is not None:
                group.close()
            if reason is not None:
                raise ModelError(reason) from error
            raise

    @property
    def card(self) -> ModelCard:
        """See Engine."""
        return self._own.card

    @property
    def store(self) -> BlockStore:
        """See Engine."""
        return self._store

    @property
    def adapters(self) -> AdapterSlots | None:
        """See Engine."""
        return self._adapters

    @property
    def profiler(self) -> Profiler:
        """See Engine."""
        return self._profiler

    @property
    def runs_ahead(self) -> bool:
        """See Engine. With stages, steps of other sequences are launched instead."""
        return self._own.runs_ahead and self._num_stages == 1

    @property
    def num_stages(self) -> int:
        """See Engine."""
        return self._num_stages

    @property
    def num_slots(self) -> int:
        """See Engine."""
        return self._own.num_slots

    def load_head(self, directory: Path, kv_bytes: int) -> DraftHead:
        """See TorchEngine. The head is on the leader alone: hidden states are equal on all ranks of a stage, of which it needs all
        layers.
        """
        assert self._num_stages == 1, f"the leader has a part of the layers only, of {self._num_stages} stages"
        return self._own.load_head(directory, kv_bytes)

    @property
    def head(self) -> DraftHead | None:
        """See TorchEngine. The layer of the checkpoint, of which each rank has its part."""
        own = self._own.head
        return None if own is None else RankedHead(own, self._together, self._ranks.tell)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Engine. Raises DeviceFailedError if a rank is lost."""
        self._profiler.pass_on()
        # The other ranks do not hear of the step before. An encoder may fail, or take longer than ranks wait for each other.
        self._own.encode(plan)
        step = self._together(Launch(_without_pixels(plan)), lambda: self._own.launch(plan))
        return _RankedStep(step, self) if self._num_stages == 1 else StagedStep(step, self._results)

    def sample(self, step: LaunchedStep, inputs: SamplingInputs) -> None:
        """Sample a deferred ``step`` on the leader and on all ranks."""
        self._together(Sample(inputs), lambda: step.sample(inputs))

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """See Engine."""
        self._together(Copy(tuple(pairs)), lambda: self._own.copy_blocks(pairs))

    def check_device(self) -> None:
        """See Engine. A lost rank counts as a failed device."""
        for reason in self._ranks.lost:
            raise DeviceFailedError(reason)
        self._own.check_device()

    def not_live(self) -> list[str]:
        """See Engine."""
        return self._ranks.lost

    def close(self) -> None:
        """See Engine."""
        self._ranks.close()
        self._own.close()
        self._group.close()

    def _results(self) -> Stepped:
        """The results of the oldest step. Ranks of each stage wait for those before, and the leader for all."""
        return self._ranks.results(self._first_of_last, TOGETHER_S * (self._num_stages + 1))

    def _together(self, message: Launch | Sample | Copy | Draft, act: Callable[[], T]) -> T:
        """All ranks do what ``message`` says, and this process calls ``act``; or none does."""
        for reason in self._ranks.lost:
            raise DeviceFailedError(reason)
        self._ranks.tell(message)
        try:
            return act()
        except Exception as error:
            if self._ranks.agree_on_failure(str(error)):
                raise
            raise DeviceFailedError(self._ranks.lost[0]) from error


class _RankedStep:
    """Implements LaunchedStep. When the leader's part is done, the other ranks have also written their K/V: they meet in its last
    collective, which each enters after its own K/V.
    """

    def __init__(self, own: LaunchedStep, engine: RankedEngine) -> None:
        self._own = own
        self._engine = engine

    @property
    def is_deferred(self) -> bool:
        return self._own.is_deferred

    def sample(self, inputs: SamplingInputs) -> None:
        self._engine.sample(self._own, inputs)

    def wait(self) -> list[RowResult]:
        return self._own.wait()


def _without_pixels(plan: StepPlan) -> StepPlan:
    """The plan for ranks that do not encode images."""
    if not any(join.images for join in plan.joins):
        return plan
    replace = msgspec.structs.replace
    joins = (one if one.images is None else replace(one, images=one.images.without_inputs()) for one in plan.joins)
    return replace(plan, joins=tuple(joins))


def _parts(own: torch.Tensor, ranks: Ranks, nbytes: Seq[int]) -> list[Part]:
    """The pools of all ranks. ``own``: the leader's, ``[num_blocks, block_nbytes]``. ``nbytes``: of the others' blocks."""
    device, num_blocks = own.device, len(own)
    first = OwnBlocks(own, CudaCopies(device)) if device.type == "cuda" else HostPart(own.numpy())
    return [first, *(rank.part(device, num_blocks, its) for rank, its in zip(ranks.others, nbytes, strict=True))]
