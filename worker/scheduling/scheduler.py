"""The interface of schedulers, and the parts that both roles share: the books of waiting and running sequences.

Each role decides by itself which tokens are computed next. Runs on the model thread alone. Uses no sockets and no clock.
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
    """What a step brought one request, for its service. Holds copies of values, because the sequence changes meanwhile."""

    key: Key
    token: SampledToken | None  # None: a chunk of the prompt; in a beam search, its begin or, with ``beams``, its end
    finish_reason: FinishReason | None
    num_cached_tokens: int  # cached tokens of the prompt
    num_ready_blocks: int  # leading blocks with complete K/V; all blocks once the prompt is computed
    beams: tuple[FinishedBeam, ...] = ()
    failure: str | None = None  # why the request failed; its token does not count
    prompt_logprobs: list[SampledToken] | None = None  # if this worker prefilled the sequence and it asks for them


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's rows, and the blocks to copy before it. ``admitted`` sequences start with it, ``preempted`` ones lost blocks.

    For a beam search its leader is listed. A beam search that was handed over is admitted without a row.
    """

    rows: list[StepRow]
    copies: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)  # pairs of blocks, (source, target)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler(ABC):
    """Schedules steps, takes in their results, and learns their cost: one step after the other."""

    def __init__(
        self,
        settings: SchedulerSettings,
        blocks: BlockManager,
        max_model_len: int,
        device_type: str,
        num_stages: int = 1,
    ) -> None:
        """``device_type``: "cpu" or "cuda", for defaults of the largest step. ``num_stages``: of the engine."""
        self._num_stages = num_stages
        self._max_num_seqs = sequences_at_a_time(settings.max_num_seqs, device_type)
        self._max_batched_tokens = prompt_step_tokens(settings.max_batched_tokens, device_type)
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._places = Places()
        self.lost: list[Key] = []  # see ``take_lost``
        # See Status.prompt_tokens_per_s.
        self.prompt_tokens_per_s: float | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences, the next one first."""
        return self._places.waiting

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, the most senior first."""
        return self._places.running

    def take_lost(self) -> tuple[Key, ...]:
        """The sequences that were removed since the last call, because they lost their blocks and cannot be computed again here."""
        lost, self.lost = tuple(self.lost), []
        return lost

    @abstractmethod
    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """Queue a sequence. ``first``: for a beam search that was handed over, the prefill worker's sample."""

    @abstractmethod
    def remove(self, key: Key) -> Sequence | None:
        """Remove and return a sequence, waiting or running. None if it is not (or no longer) here."""

    def take_back(self, key: Key) -> bool:
        """Remove a sequence if it waits, holds no blocks and was never preempted. False if there is none with this key."""
        waiting = (one for one in self.waiting if one.key == key)
        return (
            any(not one.block_tables and one.num_preemptions == 0 for one in waiting) and self.remove(key) is not None
        )

    def drop(self, sequence: Sequence) -> None:  # noqa: B027 - a prefill worker has nothing to give up
        """Give up a sequence after ``add`` raised."""

    @abstractmethod
    def schedule(self, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        """Choose the next step, at ``now_s`` on the clock of ``arrival_s``. No rows: nothing waits, or there is no room.

        ``choice``: the candidates.
        """

    def ahead(self, flying: Seq[StepRow]) -> Schedule | None:
        """The step after one that still runs, without knowing its tokens. None if the next step must wait for them."""
        return None

    @abstractmethod
    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """Learn the cost of steps from the step of ``rows``, which took ``step_s``."""

    @abstractmethod
    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Progress]:
        """Advance the sequences by the results. ``behind``: rows of the next step, if it runs already."""

    def abandon(self, rows: Seq[StepRow]) -> None:  # noqa: B027 - nor does it run ahead
        """A step that ran ahead has ended without results."""

    def on_failed(self, rows: Seq[StepRow], group: frozenset[Key] | None) -> list[Sequence]:
        """A step of ``rows`` failed before its tokens came. Returns the sequences that may have caused it; they compute again.

        No rows: the scheduling for ``group`` failed.
        """
        if not rows:
            return Choice(group).among(self.running + self.waiting[:1])
        return [row.sequence for row in rows if row.sequence.status is not SequenceStatus.FINISHED]

    def check_integrity(self) -> None:
        """Assert that places, statuses and the block manager's books agree. Called after every test and after a failure."""
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
    """The progress of a sequence, to which ``token`` was already appended. For a beam search: of its leader."""
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
