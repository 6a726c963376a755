"""Virtual time, and processes that can be killed, stopped and continued between any two callbacks.

The clock of the asyncio loop jumps to the next timer when no callback is ready. Every callback belongs to the process in whose
context it was scheduled. Callbacks of a killed process never run; callbacks of a stopped process wait until it resumes.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import random
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_THREAD_HOP_S = 0.002  # at most, from another thread to the loop's


class ProcessState(enum.Enum):
    """Whether a process runs."""

    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP
    DEAD = "dead"  # SIGKILL, or ended


class Process:
    """One simulated process."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self.loop = loop
        self.hopped_s = 0.0  # when the last call from another thread arrives
        self.ahead_s = 0.0  # how far the model thread is ahead of the loop, in a step that takes time
        self._told_s = 0.0  # when the last call from such a step arrives
        self._parked: list[tuple[_Call, contextvars.Context]] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    @property
    def member(self) -> str:
        """The name of the member whose process it is: without the number of the start."""
        return self.name.partition(".")[0]

    def clock(self) -> float:
        """The time that the process's threads read."""
        return self.loop.now_s + self.ahead_s

    def hop(self, delay_s: float) -> float:
        """Returns when a call from another thread arrives: after earlier calls, but it does not wait for a step under way."""
        if self.ahead_s > 0:
            self._told_s = max(self._told_s, self.clock() + delay_s) + 1e-9
            return self._told_s
        self.hopped_s = max(self.hopped_s, self.clock() + delay_s) + 1e-9
        return self.hopped_s

    def end_step(self) -> None:
        """The step has taken its time: later calls arrive after those that the step made."""
        self.hopped_s = max(self.hopped_s, self._told_s)

    def kill(self) -> None:
        """The process runs no further callback."""
        self.state = ProcessState.DEAD

    def stop(self) -> None:
        """The process runs no callback until it resumes."""
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.STOPPED

    def resume(self) -> None:
        """A stopped process runs the callbacks that waited, and all later ones."""
        if self.state is ProcessState.STOPPED:
            self.revive()

    def revive(self) -> None:
        """The process goes on, even if it was killed. At the end of a world all tasks must be able to end."""
        self.state = ProcessState.RUNNING
        parked, self._parked = self._parked, []
        for call, context in parked:
            self.loop.call_soon(self._run_parked, call, context=context)

    def run(self, call: _Call) -> None:
        """Run a callback of this process now, or keep it until the process resumes."""
        if self.state is ProcessState.RUNNING:
            self.loop.count_event()  # a trigger before this event may stop or kill this process
        if self.state is ProcessState.RUNNING:
            call.callback(*call.args)
            self.loop.after_event(self)
        else:
            self._parked.append((call, contextvars.copy_context()))

    def _run_parked(self, call: _Call) -> None:
        # A callback that ran after the process resumed may have cancelled this one.
        if call.handle is None or not call.handle.cancelled():
            call.callback(*call.args)
            self.loop.after_event(self)


@dataclass(slots=True, eq=False)
class _Call:
    """A scheduled callback."""

    callback: Callable[..., Any]
    args: tuple[Any, ...]
    handle: asyncio.Handle | None = None


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process:
    """The process whose callback runs."""
    process = _PROCESS.get()
    assert process is not None, "outside of all simulated processes"
    return process


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: it passes the time it would wait to ``jump``."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and (timeout is None or timeout > 0):
            self._jump(timeout)
        return events


class _InlineExecutor(ThreadPoolExecutor):
    """Runs a call at once instead of on another thread."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class SimLoop(asyncio.SelectorEventLoop):
    """The loop of a world. All chance comes from its ``random``."""

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.random = random.Random(seed)
        self.step_s = 0.004  # of a model, at most
        self.num_events = 0
        self.triggers: dict[int, Callable[[], None]] = {}  # by number of the event: called right before it
        self.after_event: Callable[[Process], None] = lambda _: None
        self.problems: list[str] = []  # what must not happen, and did
        super().__init__(_JumpingSelector(self._jump))
        self.set_default_executor(_InlineExecutor(1))
        # All tasks are kept: else the garbage collector would end those of a killed process at some moment.
        self.tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)

    def _make_task(self, _: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=self, **options)
        self.tasks.append(task)
        task.add_done_callback(self._on_task_done, context=contextvars.Context())  # in no process
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"{task.get_coro()} failed: {error!r}")

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise RuntimeError("a deadlock: nothing will ever happen again")
        self.now_s += timeout

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def count_event(self) -> None:
        """Count a callback that is about to run, and call the trigger of its number."""
        self.num_events += 1
        if (trigger := self.triggers.pop(self.num_events, None)) is not None:
            trigger()

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See asyncio; in the process of the context."""
        context = context or contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        call = _Call(callback, args)
        call.handle = super().call_soon(process.run, call, context=context)
        return call.handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio; in the process of the context."""
        context = context or contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        call = _Call(callback, args)
        call.handle = handle = super().call_at(when, process.run, call, context=context)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See asyncio. The call arrives a little later, in order, as calls from another thread do."""
        process = (context or contextvars.copy_context()).get(_PROCESS)
        if process is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        arrives_s = process.hop(self.random.uniform(0, _THREAD_HOP_S))
        return self.call_at(arrives_s, callback, *args, context=context)
