"""What a scheduler is, and what both roles' share: books of who waits and who runs must agree with the block manager's.

Which tokens are computed next is each role's own. Runs on the model thread alone. Knows no sockets and no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.beams.search import FinishedBeam
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.settings import prompt_step_tokens, sequences_at_a_time
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.scheduling.choice import EVERYBODY, Choice
from kvrelay.worker.scheduling.places import Places
from kvrelay.worker.scheduling.sequence_blocks import owner_of
from kvrelay.worker.scheduling.suspects import Key
from kvrelay.worker.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step brought one request, as its service hears of it: values, for the sequence goes on."""

    key: Key
    token: (
        SampledToken | None
    )  # None: a chunk of its prompt; of a beam search, that it has begun or, with its ``beams``, ended
    finish_reason: FinishReason | None
    num_cached_tokens: int  # of its prompt
    num_ready_blocks: int  # leading ones whose K/V are complete; all of them once the prompt is computed
    beams: tuple[FinishedBeam, ...] = ()
    failure: str | None = None  # why it ended without a reason to finish: the token does not count
    prompt_logprobs: list[SampledToken] | None = None  # if the sequence was prefilled here and asks for them


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's rows, and what must be copied before; ``admitted`` start with it, ``preempted`` lost their blocks.

    Of a beam search the leader is admitted or preempted. One that was handed over is admitted without a row.
    """

    rows: list[StepRow]
    copies: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)  # of blocks, as (source, target)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler(ABC):
    """Schedules, takes in what was computed, and learns what it cost: one step after the other."""

    def __init__(
        self,
        settings: SchedulerSettings,
        blocks: BlockManager,
        max_model_len: int,
        device_type: str,
        num_stages: int = 1,
    ) -> None:
        """``device_type``: what computes, "cpu" or "cuda": how large a step may be if the settings do not say. ``num_stages``: the
        engine's."""
        self._num_stages = num_stages
        self._max_num_seqs = sequences_at_a_time(settings.max_num_seqs, device_type)
        self._max_batched_tokens = prompt_step_tokens(settings.max_batched_tokens, device_type)
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._places = Places()
        # What prompts would get now, beside those that generate; 0: nothing is left for them. None: not known yet.
        self.prompt_tokens_per_s: float | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """Those that wait, the next one first."""
        return self._places.waiting

    @property
    def running(self) -> list[Sequence]:
        """Those that run, the most senior first."""
        return self._places.running

    @abstractmethod
    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """Queue a sequence. ``first``: of a beam search that was handed over, what the prefill worker sampled."""

    @abstractmethod
    def remove(self, key: Key) -> Sequence | None:
        """Take a sequence out, wherever it is. None if it is not (or no longer) here."""

    def take_back(self, key: Key) -> bool:
        """Take a sequence out of which nothing is computed, and which holds no blocks; False if there is none of that name."""
        waiting = (one for one in self.waiting if one.key == key)
        return (
            any(not one.block_tables and one.num_preemptions == 0 for one in waiting) and self.remove(key) is not None
        )

    def drop(self, sequence: Sequence) -> None:  # noqa: B027 - a prefill worker has nothing to give up
        """Give up a sequence that ``add`` could not take in."""

    @abstractmethod
    def schedule(self, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        """Choose the next step, at ``now_s`` on the clock of the sequences' ``arrival_s``. No rows: nothing waits, or no room.

        ``choice``: who may be in it.
        """

    def ahead(self, flying: Seq[StepRow]) -> Schedule | None:
        """The step behind one that still runs, with no tokens of that known. None if there is none to launch before they are."""
        return None

    @abstractmethod
    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """The step of ``rows`` took so long: what later ones may take follows from it."""

    @abstractmethod
    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Progress]:
        """Advance the sequences by what was computed. ``behind``: the step that runs already."""

    def abandon(self, rows: Seq[StepRow]) -> None:  # noqa: B027 - nor does it run ahead
        """A step that ran ahead is over and yields nothing."""

    def on_failed(self, rows: Seq[StepRow], group: frozenset[Key] | None) -> list[Sequence]:
        """A step of ``rows`` failed before its tokens came: who was in it computes again. Returns who may have broken it.

        No rows: it could not even be scheduled, for ``group``.
        """
        if not rows:
            return Choice(group).among(self.running + self.waiting[:1])
        return [row.sequence for row in rows if row.sequence.status is not SequenceStatus.FINISHED]

    def check_integrity(self) -> None:
        """Assert that places, statuses and the block manager's books agree: after every test, and after a failure."""
        self._blocks.check_integrity()
        for place, status in ((self.waiting, SequenceStatus.WAITING), (self.running, SequenceStatus.RUNNING)):
            for sequence in place:
                assert sequence.status is status, f"{sequence.key} is {sequence.status.name} among the {status.name}"
                for group in range(self._blocks.num_groups):
                    owned = self._blocks.owned_blocks(owner_of(sequence), group)
                    table = sequence.block_tables[group] if sequence.block_tables else []
                    theirs = zip(table, owned, strict=False)
                    is_its = len(table) == len(owned) and all(one in (None, block_id) for block_id, one in theirs)
                    assert is_its, f"{sequence.key} computes in {table} of group {group}, owns {owned}"
        keys = [(sequence.key, sequence.beam) for sequence in self.waiting + self.running]
        assert len(set(keys)) == len(keys), f"a sequence is here twice: {sorted(keys)}"


def progress_of(
    sequence: Sequence, token: SampledToken | None, num_ready_blocks: int, beams: tuple[FinishedBeam, ...] = ()
) -> Progress:
    """Of a sequence that has its token already; of a beam search, the leader."""
    return Progress(
        key=sequence.key,
        token=token,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens),
        num_ready_blocks=num_ready_blocks,
        beams=beams,
        failure=sequence.failure,
        prompt_logprobs=None if sequence.sampling.num_prompt_logprobs is None else sequence.prompt_logprobs,
    )
