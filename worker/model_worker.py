"""The work of a worker's model thread: schedule → run → postprocess, fed by commands.

If the engine runs ahead, step N+1 is scheduled and launched before step N's tokens are fetched, unless the scheduler needs them
first (:mod:`kvrelay.decode_worker.run_ahead`). Sending, scheduling and building batches then cost the device no time. If sampling
in step N+1 needs step N's tokens, it starts once step N is postprocessed, before step N+2 is launched.

If the engine has several stages, as many steps run at once, each of different sequences. A step's results are taken in before the
next step is scheduled, so that its sequences can continue.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.images.interface import ImageError
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader, LedStep
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Chunk, Sequence, SequenceStatus
from kvrelay.worker.canary import Canary
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.scheduling.choice import Choice
from kvrelay.worker.scheduling.scheduler import Progress, Schedule, Scheduler
from kvrelay.worker.scheduling.suspects import Key, Suspects

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """Take in a sequence."""

    sequence: Sequence
    first: SampledToken | None = None  # for a beam search that was handed over: the prefill worker's sample


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a sequence. A report answers with ``removed``, even if the sequence is not there."""

    key: Key


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Remove a sequence if nothing of it is computed and it holds no blocks. Only then a report answers with ``taken_back``."""

    key: Key


Command = Add | Remove | TakeBack


@dataclass(frozen=True, slots=True)
class Report:
    """Events of the model thread: before a step, after it, or on a removal."""

    started: tuple[Key, ...] = ()
    preempted: tuple[Key, ...] = ()
    progress: tuple[Progress, ...] = ()
    removed: tuple[Key, ...] = ()
    taken_back: tuple[Key, ...] = ()
    # Ended, because they lost their blocks and cannot be computed again here; the model thread no longer uses their blocks.
    lost: tuple[Key, ...] = ()
    failed: tuple[Key, ...] = ()  # ended by a failed step; the model thread no longer uses their blocks
    unreadable: tuple[Key, ...] = ()  # those of ``failed`` whose images break every step; ``detail`` is for the client
    detail: str = ""
    computes_wrongly: bool = False  # the canary's answer changed; no step follows


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: Schedule
    step: LedStep | None  # None: no rows, only admissions; or its launch failed


class ModelWorker:
    """The worker that :class:`kvrelay.worker.loop.ModelLoop` runs. It calls ``emit``, which must not block, on the model thread."""

    def __init__(
        self,
        leader: Leader,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        emit: Callable[[Report], None],
        clock: Clock,
        canary: Canary | None = None,
    ) -> None:
        self._leader = leader
        self._engine = leader.engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._emit = emit
        self._clock = clock
        self._canary = canary
        self._computes_wrongly = False
        self._launched: list[_Launched] = []  # steps whose tokens are not fetched yet, oldest first
        self._taking_in: tuple[Key, ...] = ()  # sequences whose tokens are being taken in
        self._suspects = Suspects()
        self._removals: list[Key] = []  # removals that wait for a running step
        self._since_s = 0.0  # start of the oldest step on the device, as far as the host knows

    def handle(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Add(sequence, first):
                self._scheduler.add(sequence, first)
            case Remove(key):
                self._removals.append(key)
                self._remove()
            case TakeBack(key):
                if self._scheduler.take_back(key):
                    self._emit(Report(taken_back=(key,)))

    def leave(self) -> None:
        """The model thread ends. Steps that are being recorded for people leave no trace."""
        if self._engine.profiler is not None:
            self._engine.profiler.give_up()

    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or a step is running. Always False for a worker that computes wrongly."""
        has_any = bool(self._launched or self._scheduler.waiting or self._scheduler.running)
        return has_any and not self._computes_wrongly

    @property
    def is_checking(self) -> bool:
        """Whether a canary is unfinished, so that ``idle`` should be called again at once."""
        return self._canary is not None and self._canary.is_under_way

    def idle(self) -> None:
        """Without work, run one step of the canary if it is due. Raises DeviceFailedError if no step can succeed any more."""
        if self._canary is None or self._computes_wrongly:
            return
        try:
            is_same = self._canary.step()
        except Exception:
            # The error says nothing about earlier answers. ``check_device`` notices a failed device.
            logger.exception("the canary could not be computed")
            self._metrics.canaries.labels("failed").inc()
            self._engine.check_device()
            return
        if is_same is None:
            return
        self._metrics.canaries.labels("same" if is_same else "changed").inc()
        if not is_same:
            self._computes_wrongly = True
            self._emit(Report(computes_wrongly=True))

    def step(self) -> bool:
        """Run one step of the batch. False if no sequence got blocks; the loop then waits for news."""
        if self._canary is not None:
            self._canary.abandon()
        is_changed = self._fill()
        if not self._launched:
            return is_changed
        # A sequence that is about to be removed must not write to its blocks in another step.
        if self._engine.runs_ahead and not self._removals and self._suspects.group is None:
            ahead = self._scheduler.ahead(self._launched[0].plan.rows)
            if ahead is not None:
                self._launch(ahead)
        step = self._launched[0].step
        results = [] if step is None else step.wait()
        self._finish(self._launched.pop(0).plan, results)
        self._remove()
        if self._launched and (behind := self._launched[0].step) is not None and behind.is_deferred:
            behind.sample()  # the sequences have the tokens that it waited for; the next step needs its own
        return True

    def _fill(self) -> bool:
        """Launch as many steps as the engine has stages. Returns whether the books changed, perhaps only by a preemption."""
        while not self._launched or len(self._launched) < self._num_at_once:
            plan = self._schedule()
            lost = self._scheduler.take_lost()
            if plan.preempted or lost:
                self._metrics.preemptions.inc(len(plan.preempted) + len(lost))
                self._emit(Report(preempted=tuple(sequence.key for sequence in plan.preempted), lost=lost))
            if not plan.rows and not plan.admitted:
                # A preemption without a row changed the books: look again at once.
                return bool(plan.preempted or lost)
            if not self._launched:
                self._since_s = self._clock()
            self._launch(plan)
        return True

    @property
    def _num_at_once(self) -> int:
        """How many steps may run at once. With suspects only one."""
        return 1 if self._suspects.group is not None else self._engine.num_stages

    def _schedule(self) -> Schedule:
        now_s = self._clock()
        while (group := self._suspects.group) is not None:
            plan = self._scheduler.schedule(now_s, Choice(group))
            if plan.rows or plan.admitted or plan.preempted or self._scheduler.lost:
                return plan
            self._suspects.clear()
        return self._scheduler.schedule(now_s, Choice(None, frozenset(self._removals), self._flying))

    @property
    def _flying(self) -> list[StepRow]:
        """Rows of all running steps."""
        return [row for launched in self._launched for row in launched.plan.rows]

    def _launch(self, plan: Schedule) -> None:
        for sequence in plan.admitted:
            if sequence.num_preemptions == 0:
                self._metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
                self._metrics.cached_tokens.inc(min(sequence.num_cached_tokens, sequence.num_prompt_tokens))
        if plan.admitted:  # reported before the step, so that a prompt's offer is sent while it computes
            self._emit(Report(started=tuple(sequence.key for sequence in plan.admitted)))
        if plan.copies:
            self._engine.copy_blocks([pair for pairs in plan.copies.values() for pair in pairs])
        behind = self._launched[-1].step if self._launched and self._engine.runs_ahead else None
        self._launched.append(_Launched(plan, None))  # a step that fails at its launch may have written, too
        if plan.rows:
            self._launched[-1] = _Launched(plan, self._leader.launch(plan.rows, behind))

    def _finish(self, plan: Schedule, results: list[RowResult]) -> None:
        if plan.rows:
            now_s, begun_s = self._clock(), self._since_s
            self._since_s, step_s = now_s, now_s - begun_s
            self._metrics.step_s.observe(step_s)
            self._scheduler.observe(plan.rows, step_s)
            for row in plan.rows:
                if (trace := row.sequence.trace) is not None:
                    trace.on_step(row.sequence.num_computed_tokens, Chunk(begun_s, now_s, row.num_tokens))
        pairs = zip(plan.rows, results, strict=True)
        going_on = [(row, result) for row, result in pairs if row.sequence.status is not SequenceStatus.FINISHED]
        self._metrics.sampled_tokens.inc(sum(len(result.tokens) for _, result in going_on))
        self._taking_in = tuple(row.sequence.key for row, _ in going_on)
        # A sequence that began again has not yet come to where it failed.
        if not any(row.sequence.num_preemptions and not row.samples for row in plan.rows):
            self._suspects.clear()
        progress = tuple(self._scheduler.postprocess(plan.rows, results, self._flying))
        if progress:
            self._emit(Report(progress=progress))
        self._taking_in = ()

    def _remove(self) -> None:
        flying = {row.sequence.key for row in self._flying}
        for key in [key for key in self._removals if key not in flying]:
            self._removals.remove(key)
            try:
                self._scheduler.remove(key)
            finally:
                self._emit(Report(removed=(key,)))

    def on_step_failed(self, error: Exception) -> None:
        """Let the sequences of the failed steps compute again, and end a sequence that fails alone.

        If the failure came while tokens were being taken in, all sequences of that step end, because it is not known which have
        taken theirs. Raises AssertionError if the books disagree afterwards, DeviceFailedError if no step can succeed any more.
        """
        self._metrics.failed_steps.inc()
        rows: list[StepRow] = []
        for launched in self._launched:
            with contextlib.suppress(Exception):  # failed or not, the step has ended
                if launched.step is not None:
                    launched.step.wait()
            self._scheduler.abandon(launched.plan.rows)
            rows += launched.plan.rows
        self._launched.clear()
        taken_in = tuple(dict.fromkeys(self._taking_in))  # the beams of a search share a key
        ended = taken_in
        if not taken_in:
            suspects = self._scheduler.on_failed(rows, self._suspects.group)
            culprit = self._suspects.blame(sequence.key for sequence in suspects)
            ended = () if culprit is None else (culprit,)
        self._taking_in = ()
        for key in ended:
            self._scheduler.remove(key)
        if taken_in and rows:  # of steps behind that one, which are lost, too
            self._scheduler.on_failed(rows, None)
        unreadable = ended if isinstance(error, ImageError) and not taken_in else ()
        detail = str(error) if unreadable else f"the model step failed: {type(error).__name__}"
        ended += tuple(key for key in self._scheduler.take_lost() if key not in ended)
        self._emit(Report(failed=ended, unreadable=unreadable, detail=detail))
        self._remove()
        self._scheduler.check_integrity()
        self._engine.check_device()  # a broken device would fail fast, and so attract all traffic

    def on_command_failed(self, command: Command, error: Exception) -> None:
        """End the command's sequence. Raises AssertionError if the books disagree afterwards."""
        match command:
            case Add(sequence):
                self._scheduler.drop(sequence)
                self._emit(Report(failed=(sequence.key,), detail=f"not taken in: {type(error).__name__}"))
            case Remove() | TakeBack():
                pass  # a removal is reported in any case; a sequence that is not taken back continues
        self._scheduler.check_integrity()
