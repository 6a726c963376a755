"""What runs on the prefill worker's model thread: schedule → run → postprocess, fed by commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.clock import Clock
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.scheduler import Computed, PrefillScheduler
from kvrelay.worker.metrics import EngineMetrics

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Add:
    """Take a prompt in."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a prompt out; answered by ``removed`` in a report, also if it is not there. Its blocks stay held."""

    key: Key


Command = Add | Remove


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on the model thread, in order: starts before a step, progress after it, removals."""

    started: tuple[Sequence, ...] = ()
    computed: tuple[Computed, ...] = ()
    removed: tuple[Key, ...] = ()
    failed: tuple[Key, ...] = ()
    detail: str = ""
    num_tokens: int = 0  # of the step …
    step_s: float = 0.0  # … and how long it took


class PrefillModelWorker:
    """Implements :class:`kvrelay.worker.loop.LoopWorker`. ``emit`` is called on the model thread and must not block."""

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefillScheduler,
        metrics: EngineMetrics,
        emit: Callable[[Report], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._emit = emit
        self._clock = clock
        self._computing: list[StepRow] = []  # the step under way …
        self._is_computed = False  # … whose tokens are there, and are being taken in

    def handle(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Add(sequence):
                self._scheduler.add(sequence)
            case Remove(key):
                self._scheduler.remove(key)
                self._emit(Report(removed=(key,)))

    def has_work(self) -> bool:
        """Whether any prompt waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> bool:
        """One chunk of every scheduled prompt; False if no prompt could get room."""
        self._computing, self._is_computed = [], False
        rows, started = self._scheduler.schedule(self._clock())
        self._computing = rows
        if not rows:
            return False
        if started:
            # Before the chunk computes, so that the offer travels meanwhile.
            self._emit(Report(started=tuple(started)))
            self._metrics.prompt_tokens.inc(sum(sequence.num_prompt_tokens for sequence in started))
            self._metrics.cached_tokens.inc(sum(sequence.num_cached_tokens for sequence in started))
        start_s = self._clock()
        outputs = self._engine.step(rows)
        self._is_computed = True
        step_s = self._clock() - start_s
        self._metrics.step_s.observe(step_s)
        num_tokens = sum(row.num_tokens for row in rows)
        self._scheduler.observe(num_tokens, step_s)
        computed = self._scheduler.postprocess(rows, outputs)
        self._metrics.sampled_tokens.inc(sum(1 for item in computed if item.token is not None))
        self._emit(Report(computed=tuple(computed), num_tokens=num_tokens, step_s=step_s))
        return True

    def on_step_failed(self, error: Exception) -> None:
        """Let everybody compute again who was in the step, and end who breaks it alone.

        A step that fails when its tokens are there ends all in it: who has taken his token in is not known. Raises AssertionError
        if the books do not agree afterwards, DeviceFailedError if no step can succeed any more.
        """
        self._metrics.failed_steps.inc()
        failed: tuple[Key, ...] = ()
        if self._is_computed:
            failed = tuple(row.sequence.key for row in self._computing)
        elif (culprit := self._scheduler.on_failed(self._computing)) is not None:
            failed = (culprit,)
        for key in failed:
            self._scheduler.remove(key)
        self._emit(Report(failed=failed, detail=f"the model step failed: {type(error).__name__}"))
        self._scheduler.check_integrity()
        self._engine.check_device()  # one that has failed for good would draw all traffic, and fail it fast

    def on_command_failed(self, command: Command, error: Exception) -> None:
        """End the command's prompt. Raises AssertionError if the books do not agree afterwards."""
        match command:
            case Add(sequence):
                self._emit(Report(failed=(sequence.key,), detail=f"not taken in: {type(error).__name__}"))
            case Remove(key):
                self._emit(Report(removed=(key,)))
        self._scheduler.check_integrity()
