"""Traces of an engine with several ranks: the leader tells the ranks in order with plans, so all record the same steps."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.ranks.messages import Profile
from kvrelay.engine.step.profile import StepProfiler, trace_pattern


class RankedProfiler:
    """The leader's end. Implements :class:`kvrelay.engine.step.interface.Profiler`; one thread asks."""

    def __init__(self, own: StepProfiler, tell: Callable[[Profile], None]) -> None:
        """``own``: of the leader's part. ``tell``: sends to all ranks."""
        self._own = own
        self._tell = tell
        self._num_asked = 0

    def ask(self, num_steps: int) -> str | None:
        """See Profiler. The ranks hear of it with the next plan."""
        if self._num_asked or self._own.is_under_way:
            return None
        self._num_asked = num_steps
        return trace_pattern()

    def give_up(self) -> None:
        """See Profiler. The ranks end with their leader, at once."""
        self._own.give_up()

    def pass_on(self) -> None:
        """Call before a plan is sent, on the model thread."""
        if self._num_asked:
            self._own.ask(self._num_asked)
            self._tell(Profile(self._num_asked))
            self._num_asked = 0  # last: until here it is under way, as its own profiler says from here on
