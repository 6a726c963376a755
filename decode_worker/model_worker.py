"""What runs on the decode worker's model thread: schedule → run → postprocess, fed by commands.

With an engine that runs ahead, step N+1 is scheduled and launched before step N's tokens are fetched, whenever who is in it does
not depend on them (:mod:`kvrelay.decode_worker.run_ahead`); sending, scheduling and building batches then cost the device no time.
If it cannot be sampled without them, it is told to sample once step N is postprocessed, before step N+2 is launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.decode_worker.beams import FinishedBeam
from kvrelay.decode_worker.scheduler import DecodeScheduler, Progress, Schedule
from kvrelay.engine.step.interface import Engine, LaunchedStep, StepRow
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.metrics import EngineMetrics

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Add:
    """Take a sequence in."""

    sequence: Sequence
    first: SampledToken | None = None  # of a beam search that was handed over: what the prefill worker sampled


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a sequence out; answered by ``removed`` in a report, also if it is not there."""

    key: Key


Command = Add | Remove


@dataclass(frozen=True, slots=True)
class NewToken:
    """One request's token of one step, or what a beam search has to tell."""

    key: Key
    token: SampledToken | None  # None: of a beam search, that it has begun or, with its ``beams``, ended
    finish_reason: FinishReason | None
    num_cached_tokens: int
    beams: tuple[FinishedBeam, ...] = ()
    failure: str | None = None  # why it ended without a reason to finish: the token does not count
    prompt_logprobs: list[SampledToken] | None = None  # if the sequence was prefilled here and asks for them


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on the model thread: before a step, after it, or on a removal."""

    tokens: tuple[NewToken, ...] = ()
    started: tuple[Key, ...] = ()
    preempted: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()
    failed: tuple[Key, ...] = ()  # sequences that a failed step took down; their blocks are back
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: Schedule
    step: LaunchedStep | None  # None: no rows, only admissions


class DecodeModelWorker:
    """Implements :class:`kvrelay.worker.loop.LoopWorker`. ``emit`` is called on the model thread and must not block."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        metrics: EngineMetrics,
        emit: Callable[[Report], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._emit = emit
        self._clock = clock
        self._launched: list[_Launched] = []  # steps whose tokens are not fetched yet, oldest first; two at most
        self._taking_in: tuple[Key, ...] = ()  # whose tokens are there, and are being taken in
        self._removals: list[Key] = []  # asked for while a step is under way
        self._since_s = 0.0  # when the device began with the oldest, as far as the host can tell

    def handle(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Add(sequence, first):
                self._scheduler.add(sequence, first)
            case Remove(key):
                self._removals.append(key)
                if not self._launched:
                    self._remove()

    def has_work(self) -> bool:
        """Whether any sequence waits or runs, or a step is under way."""
        return bool(self._launched or self._scheduler.waiting or self._scheduler.running)

    def step(self) -> bool:
        """One step of the batch; False if no sequence could get room."""
        if not self._launched:
            plan = self._scheduler.schedule()
            if plan.preempted:
                self._metrics.preemptions.inc(len(plan.preempted))
                self._emit(Report(preempted=tuple(sequence.key for sequence in plan.preempted)))
            if not plan.rows and not plan.admitted:
                # A preemption without a row changed the books: look again at once.
                return bool(plan.preempted)
            self._since_s = self._clock()
            self._launch(plan)
        # Whoever is to be removed must not write to its blocks any more.
        if self._engine.runs_ahead and not self._removals:
            ahead = self._scheduler.ahead(self._launched[0].plan.rows)
            if ahead is not None:
                self._launch(ahead)
        step = self._launched[0].step
        outputs = [] if step is None else step.wait()
        self._finish(self._launched.pop(0).plan, outputs)
        if not self._launched:
            self._remove()
        elif (behind := self._launched[0].step) is not None and behind.is_deferred:
            behind.sample()  # the sequences have what it waited for; the next step goes on from its tokens
        return True

    def _launch(self, plan: Schedule) -> None:
        for sequence in plan.admitted:
            if sequence.num_preemptions == 0:
                self._metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
                self._metrics.cached_tokens.inc(sequence.num_cached_tokens)
        if plan.admitted:
            self._emit(Report(started=tuple(sequence.key for sequence in plan.admitted)))
        if plan.copies:
            self._engine.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        behind = self._launched[-1].step if self._launched else None
        self._launched.append(_Launched(plan, self._engine.launch(plan.rows, behind) if plan.rows else None))

    def _finish(self, plan: Schedule, outputs: list[SampledToken | None]) -> None:
        if plan.rows:
            now_s = self._clock()
            self._metrics.step_s.observe(now_s - self._since_s)
            self._scheduler.observe(plan.rows, now_s - self._since_s)
            self._since_s = now_s
        is_over = [row.sequence.status is SequenceStatus.FINISHED for row in plan.rows]
        self._metrics.sampled_tokens.inc(
            sum(1 for token, over in zip(outputs, is_over, strict=True) if token and not over)
        )
        self._taking_in = tuple(row.sequence.key for row, over in zip(plan.rows, is_over, strict=True) if not over)
        behind = self._launched[0].plan.rows if self._launched else ()
        tokens = tuple(map(_new_token, self._scheduler.postprocess(plan.rows, outputs, behind)))
        if tokens:
            self._emit(Report(tokens=tokens))
        self._taking_in = ()

    def _remove(self) -> None:
        while self._removals:
            key = self._removals.pop(0)
            try:
                self._scheduler.remove(key)
            finally:
                self._emit(Report(removed=(key,)))

    def on_step_failed(self, error: Exception) -> None:
        """Let everybody compute again whose token was in the step, or behind it, and end who breaks it alone.

        A step that fails when its tokens are there ends all in it: who has taken his token in is not known. Raises AssertionError
        if the books do not agree afterwards, DeviceFailedError if no step can succeed any more.
        """
        self._metrics.failed_steps.inc()
        rows: list[StepRow] = []
        for launched in self._launched:
            with contextlib.suppress(Exception):  # whatever it says, it has ended: nobody writes to its blocks any more
                if launched.step is not None:
                    launched.step.wait()
            self._scheduler.abandon(launched.plan.rows)
            rows += launched.plan.rows
        self._launched.clear()
        ended = tuple(dict.fromkeys(self._taking_in))  # the beams of a search share a key
        if not ended and (culprit := self._scheduler.on_failed(rows)) is not None:
            ended = (culprit,)
        self._taking_in = ()
        for key in ended:
            self._scheduler.remove(key)
        self._emit(Report(failed=ended, detail=f"the model step failed: {type(error).__name__}"))
        self._remove()
        self._scheduler.check_integrity()
        self._engine.check_device()  # one that has failed for good would draw all traffic, and fail it fast

    def on_command_failed(self, command: Command, error: Exception) -> None:
        """End the command's sequence. Raises AssertionError if the books do not agree afterwards."""
        match command:
            case Add(sequence):
                self._scheduler.drop(sequence)
                self._emit(Report(failed=(sequence.key,), detail=f"not taken in: {type(error).__name__}"))
            case Remove():
                pass  # reported, however it went
        self._scheduler.check_integrity()


def _new_token(progress: Progress) -> NewToken:
    sequence = progress.sequence
    return NewToken(
        key=sequence.key,
        token=progress.token,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        beams=progress.beams,
        failure=sequence.failure,
        prompt_logprobs=None if sequence.sampling.num_prompt_logprobs is None else sequence.prompt_logprobs,
    )
