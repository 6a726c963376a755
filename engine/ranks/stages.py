"""How tokens get from the last stage, which samples them, to the leader, which is in the first stage.

    leader       launch ─▶ its stage of the step ─▶ the next step's …        hears them ─▶ results
    last stage                        its stage of it ─▶ samples ─▶ Stepped

Each rank computes steps in the order of their plans, so results come in that order, too. Only the leader needs to know a step's
tokens: the sequence's next plan tells all ranks.
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
    """The end of a rank in the last stage. One thread calls ``launch``."""

    def __init__(self, engine: Engine, send: Callable[[Stepped], None] | None) -> None:
        """``engine``: the rank's own. ``send``: sends to the leader; None: another rank of the stage samples and reports."""
        self._engine = engine
        self._send = send
        self._told: queue.SimpleQueue[LaunchedStep | Stepped] = queue.SimpleQueue()
        if send is not None:
            threading.Thread(target=self._tell, args=(send,), name="tells-tokens", daemon=True).start()

    def launch(self, plan: StepPlan) -> None:
        """Compute a step. Sends the leader its tokens once they are there, or why they cannot be sampled.

        Raises as Engine.launch for errors before the sampling, for which other ranks may be waiting.
        """
        step = self._engine.launch(msgspec.structs.replace(plan, sampling=None))
        if self._send is not None:
            self._told.put(_sampled(step, plan.sampling))

    def _tell(self, send: Callable[[Stepped], None]) -> None:
        """Send the results. On a GPU the next step is launched meanwhile."""
        while True:
            step = self._told.get()
            try:
                send(step if isinstance(step, Stepped) else _results(step))
            except OSError:
                return  # the leader is gone, and this process is about to end


def _sampled(step: LaunchedStep, inputs: SamplingInputs | None) -> LaunchedStep | Stepped:
    if not step.is_deferred:
        return step
    assert inputs is not None, "a step of several stages is sampled as it comes"
    try:
        step.sample(inputs)
    except Exception as error:  # such as an error of a logits processor: it must end only this step
        return Stepped(failed=f"{type(error).__name__}: {error}")
    return step


def _results(step: LaunchedStep) -> Stepped:
    try:
        return Stepped(step.wait())
    except Exception as error:  # such as an error of the device: later steps cannot be launched
        return Stepped(failed=f"{type(error).__name__}: {error}")


class StagedStep:
    """The leader's end. Implements :class:`kvrelay.engine.step.interface.LaunchedStep`.

    When the last stage has a step's tokens, all ranks have written their K/V, because each sends its hidden states after writing
    its K/V.
    """

    def __init__(self, own: LaunchedStep, take: Callable[[], Stepped]) -> None:
        """``own``: the first stage's step. ``take``: waits for the results of the next step."""
        self._own = own
        self._take = take
        self._stepped: Stepped | None = None

    @property
    def is_deferred(self) -> bool:
        """See LaunchedStep. No row depends on a step that still runs."""
        return False

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        raise AssertionError("a step of several stages is sampled as it comes")

    def wait(self) -> list[RowResult]:
        """See LaunchedStep; may be called again. Raises RuntimeError if the tokens could not be sampled."""
        if self._stepped is None:
            self._stepped = self._take()
        self._own.wait()
        if self._stepped.failed is not None:
            raise RuntimeError(f"the last stage cannot sample: {self._stepped.failed}")
        return self._stepped.results
