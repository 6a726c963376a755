"""What runs on the decode worker's model thread: schedule → run → postprocess, fed by commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.decode_worker.beams import FinishedBeam
from kvrelay.decode_worker.scheduler import DecodeScheduler, Progress, Schedule
from kvrelay.engine.interface import Engine
from kvrelay.engine.metrics import EngineMetrics
from kvrelay.engine.sequence import Sequence

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
    """What happened on the model thread: after a step, or on a removal."""

    tokens: tuple[NewToken, ...] = ()
    started: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()
    failed: tuple[Key, ...] = ()  # sequences that a failed step took down; their blocks are back
    detail: str = ""


class DecodeModelWorker:
    """Implements :class:`kvrelay.engine.loop.LoopWorker`. ``emit`` is called on the model thread and must not block."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        metrics: EngineMetrics,
        emit: Callable[[Report], None],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._emit = emit

    def handle(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Add(sequence, first):
                self._scheduler.add(sequence, first)
            case Remove(key):
                self._scheduler.remove(key)
                self._emit(Report(removed=(key,)))

    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> bool:
        """One step of the batch; False if no sequence could get room."""
        plan = self._scheduler.schedule()
        self._metrics.preemptions.inc(len(plan.preempted))
        for sequence in plan.admitted:
            if sequence.num_preemptions == 0:
                self._metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
                self._metrics.cached_tokens.inc(sequence.num_cached_tokens)
        if not plan.rows and not plan.admitted:
            # A preemption without a row changed the books: look again at once.
            return bool(plan.preempted)
        if plan.admitted:
            self._emit(Report(started=tuple(sequence.key for sequence in plan.admitted)))
        outputs = self._compute(plan) if plan.rows else []
        self._metrics.sampled_tokens.inc(sum(1 for token in outputs if token is not None))
        tokens = tuple(map(_new_token, self._scheduler.postprocess(plan.rows, outputs)))
        if tokens:
            self._emit(Report(tokens=tokens))
        return True

    def _compute(self, plan: Schedule) -> list[SampledToken | None]:
        start_s = time.monotonic()
        if plan.copies:
            self._engine.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        outputs = self._engine.step(plan.rows)
        self._metrics.step_s.observe(time.monotonic() - start_s)
        return outputs

    def on_step_failed(self, error: Exception) -> None:
        """End every running sequence: which of them broke the step is unknown, and their K/V may be half written.

        With none running it was the oldest that waits which could not even be scheduled. Raises AssertionError if the
        books do not agree afterwards.
        """
        self._metrics.failed_steps.inc()
        ended = self._scheduler.running or self._scheduler.waiting[:1]
        keys = tuple(dict.fromkeys(sequence.key for sequence in ended))  # the beams of a search share one
        for key in keys:
            self._scheduler.remove(key)
        self._emit(Report(failed=keys, detail=f"the model step failed: {type(error).__name__}"))
        self._scheduler.check_integrity()

    def on_command_failed(self, command: Command, error: Exception) -> None:
        """End the command's sequence. Raises AssertionError if the books do not agree afterwards."""
        match command:
            case Add(sequence):
                self._scheduler.drop(sequence)
                self._emit(Report(failed=(sequence.key,), detail=f"not taken in: {type(error).__name__}"))
            case Remove(key):
                self._emit(Report(removed=(key,)))
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
