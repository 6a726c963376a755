"""How tokens get from the last stage, which samples them, to the leader, which is in the first.

    leader       launch ─▶ its stage of the step ─▶ the next step's …        hears them ─▶ results
    last stage                        its stage of it ─▶ samples ─▶ Stepped

Each rank computes steps in the order of their plans, so results come in it, too. What a step's tokens are, nobody but the leader
has to know: the next plan of a sequence tells all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from kvrelay.engine.ranks.messages import Stepped
from kvrelay.engine.step.interface import Engine, LaunchedStep
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan


class LastStage:
    """The end of a rank of the last stage. ``launch`` is one thread's."""

    def __init__(self, engine: Engine, send: Callable[[Stepped], None] | None) -> None:
        """``engine``: the rank's own. ``send``: to the leader; None: another rank of the stage samples and tells it."""
        self._engine = engine
        self._send = send
        self._told: queue.SimpleQueue[LaunchedStep | Stepped] = queue.SimpleQueue()
        if send is not None:
            threading.Thread(target=self._tell, args=(send,), name="tells-tokens", daemon=True).start()

    def launch(self, plan: StepPlan) -> None:
        """Compute a step, and let the leader know its tokens once they are there, or why they cannot be sampled.

        Raises as Engine.launch, what goes wrong before the sampling, which other ranks may wait in.
        """
        step = self._engine.launch(msgspec.structs.replace(plan, sampling=None))
        if self._send is not None:
            self._told.put(_sampled(step, plan.sampling))

    def _tell(self, send: Callable[[Stepped], None]) -> None:
        """On a GPU the next step is launched meanwhile."""
        while True:
            step = self._told.get()
            try:
                send(step if isinstance(step, Stepped) else _results(step))
            except OSError:
                return  # the leader is gone, and the process about to end


def _sampled(step: LaunchedStep, inputs: SamplingInputs | None) -> LaunchedStep | Stepped:
    if not step.is_deferred:
        return step
    assert inputs is not None, "a step of several stages is sampled as it comes"
    try:
        step.sample(inputs)
    except Exception as error:  # of a logits processor, for instance: it must end the step alone
        return Stepped(failed=f"{type(error).__name__}: {error}")
    return step


def _results(step: LaunchedStep) -> Stepped:
    try:
        return Stepped(step.wait())
    except Exception as error:  # of a device: later steps cannot be launched
        return Stepped(failed=f"{type(error).__name__}: {error}")


class StagedStep:
    """The leader's end. Implements :class:`kvrelay.engine.step.interface.LaunchedStep`.

    When the last stage has a step's tokens, all ranks have written what they write: each hands on what it computed behind its K/V.
    """

    def __init__(self, own: LaunchedStep, take: Callable[[], Stepped]) -> None:
        """``own``: the first stage's. ``take``: the results of the next step, waited for."""
        self._own = own
        self._take = take
        self._stepped: Stepped | None = None

    @property
    def is_deferred(self) -> bool:
        """See LaunchedStep. No row follows from a step that still runs."""
        return False

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        raise AssertionError("a step of several stages is sampled as it comes")

    def wait(self) -> list[RowResult]:
        """See LaunchedStep; it may be called again. Raises RuntimeError if the tokens could not be sampled."""
        if self._stepped is None:
            self._stepped = self._take()
        self._own.wait()
        if self._stepped.failed is not None:
            raise RuntimeError(f"the last stage cannot sample: {self._stepped.failed}")
        return self._stepped.results
