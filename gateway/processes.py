"""Several processes that serve one gateway's port: their parent, which serves nothing itself.

Detokenization, stop strings and server-sent events take a gateway some tens of microseconds a token, on one core, because Python
runs one thread at a time. With ``--workers N`` there are N processes, each a whole gateway (:mod:`kvrelay.gateway.process`): own
links to the workers under its own id, own tokenizer, own event loop. Nothing on the way of a token is shared.

*Started by exec, not by fork.* A fork of this process would share the pages of what it has loaded, but it would also have to come
before any thread: and loading is what starts threads (a download, the tokenizer's pool, ZeroMQ's). A process that is started anew
after hours must be as sound as the first, so each is a program of its own, started in about a second. This parent loads none
of it, and stays small.

*One listening socket, inherited by all.* It is the parent's, so the port is never closed while a process dies or starts, and what
waits in its queue is taken by whoever lives. With SO_REUSEPORT each process would have a queue of its own: the kernel deals
connections out by a hash, evenly only when they are many, and those dealt to a process that has just died are reset. Here each
takes one connection at a time, and not when another has fewer (:mod:`kvrelay.gateway.http_server`): they stay even when they are
few and long, too.

*What is one for all of them:* the bounds of the settings (:func:`kvrelay.gateway.process.share_of`), the API keys' limits
(:mod:`kvrelay.gateway.shared_memory`), and the metrics: the parent asks all for theirs when one of them is asked, and adds what
those that have ended had counted. It also asks every two seconds: what a process counted since then is lost if it is killed.

Its life: all are started; if one cannot start before any has served, the gateway ends with that error. A process that ends later is
started again after a growing pause; one that has not answered for 30 seconds is killed, for probes of its health would be answered
by the others. SIGTERM or SIGINT closes the port and drains all; a second one hurries them. If this process is
killed, its children are killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvrelay.common.errors import KvrelayError, SettingsError
from kvrelay.gateway.metric_totals import Family, added, lasting, snapshot
from kvrelay.gateway.metrics import SEEN_BY_ALL, count_process_deaths
from kvrelay.gateway.process_link import (
    AskTotals,
    Assignment,
    CannotServe,
    Metrics,
    ProcessLink,
    Serving,
    TellMetrics,
    ToChild,
    ToParent,
    Totals,
    parents_link,
)
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_STABLE_S = 30.0  # a death after this long of running counts as the first one
_ASK_EVERY_S = 2.0
_ANSWER_S = 1.0  # how long a process may take to tell its metrics; then its last ones count
_HUNG_S = 30.0
_KILL_AFTER_DRAIN_S = 4.0  # what a process may take to end after its drain time


class ProcessesError(KvrelayError):
    """A process could not begin to serve; its log has the reason."""


@dataclass(eq=False, slots=True)
class _Child:
    """One process, from its start to its end."""

    index: int
    process: asyncio.subprocess.Process
    link: ProcessLink[ToChild, ToParent]
    started_s: float
    heard_s: float
    is_serving: bool = False
    failure: CannotServe | None = None
    families: Sequence[Family] = ()  # as last told
    told: asyncio.Event = field(default_factory=asyncio.Event)  # they are newer than the question

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Processes:
    """The processes of one gateway. ``run`` once, on the main thread."""

    def __init__(self, settings: GatewaySettings, listener: socket.socket, *, hung_s: float = _HUNG_S) -> None:
        """``listener`` is bound; it stays the caller's, and is closed when the gateway ends.

        ``hung_s``: how long a process may be silent before it is killed.
        """
        self._hung_s = hung_s
        self._settings = settings
        self._listener = listener
        self._num_processes = settings.processes.workers
        self._memory = SharedMemory.create(self._num_processes)
        self._children: dict[int, _Child] = {}
        self._has_served = False  # any of them
        self._num_killed = 0
        self._stopping = asyncio.Event()
        self._past: list[Family] = []  # of processes that have ended
        registry = CollectorRegistry()
        self._deaths = count_process_deaths(registry)
        self._registry = registry

    def run(self) -> int:
        """Keep all of them running until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if they cannot start."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        asking = asyncio.create_task(self._ask_for_ever())
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._num_processes):
                    group.create_task(self._keep(index))
        except* KvrelayError as errors:
            raise _first(errors) from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self._memory.close()
        return 1 if self._num_killed else 0

    def _on_signal(self) -> None:
        if not self._stopping.is_set():
            logger.info("gateway: draining for at most %.0f s", self._settings.drain_s)
            self._stopping.set()
            self._listener.close()  # the port is closed when they have closed theirs
            end_s = self._settings.drain_s + _KILL_AFTER_DRAIN_S
            asyncio.get_running_loop().call_later(end_s, self._kill_all)
        for child in self._children.values():
            child.signal(signal.SIGTERM)

    def _kill_all(self) -> None:
        for child in self._children.values():
            logger.error("process %d has not ended in time; it is killed", child.index)
            self._num_killed += 1
            child.signal(signal.SIGKILL)

    # -- one place, and the processes that have it one after the other ------------------------------------------------

    async def _keep(self, index: int) -> None:
        num_deaths = 0  # in a row
        while not self._stopping.is_set():
            child = await self._start(index)
            how = await self._ended(child)
            if self._stopping.is_set():
                return
            if not self._has_served:
                raise _why_it_cannot_serve(child, how)
            self._deaths.inc()
            lived_s = time.monotonic() - child.started_s
            num_deaths = 1 if child.is_serving and lived_s >= _STABLE_S else num_deaths + 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_deaths - 1, 30))
            reason = how if child.failure is None else child.failure.detail
            logger.error("process %d ended (%s); it is started again in %.1f s", index, reason, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _start(self, index: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), self._listener.fileno(), self._memory.descriptor)
            process = await asyncio.create_subprocess_exec(
                # -P: the working directory must not come before the installed packages.
                sys.executable, "-P", "-m", "kvrelay.gateway.process", *map(str, descriptors), str(os.getpid()),
                pass_fds=descriptors,
                env={"RAYON_NUM_THREADS": str(_threads(self._num_processes)), **os.environ},
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C is this process's to pass on
            )  # fmt: skip
        now_s = time.monotonic()
        child = _Child(index, process, parents_link(ours), started_s=now_s, heard_s=now_s)
        self._children[index] = child
        await child.link.open()
        child.link.send(Assignment(self._settings, index, self._num_processes))
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        return child

    async def _ended(self, child: _Child) -> str:
        """Hear what the process says until it ends; how it did. What it leaves is cleared up."""
        answers: set[asyncio.Task[None]] = set()
        try:
            while (message := await child.link.receive()) is not None:
                child.heard_s = time.monotonic()
                match message:
                    case Serving():
                        child.is_serving = self._has_served = True
                        logger.info("process %d (pid %d) serves", child.index, child.process.pid)
                    case CannotServe():
                        child.failure = message
                    case Metrics(families=families):
                        child.families = families
                        child.told.set()
                    case AskTotals(number=number):
                        task = asyncio.create_task(self._answer(child, number))
                        answers.add(task)
                        task.add_done_callback(answers.discard)
            code = await child.process.wait()
        except asyncio.CancelledError:  # another one could not start
            child.signal(signal.SIGKILL)
            await child.process.wait()
            raise
        finally:
            for task in answers:
                task.cancel()
            child.link.close()
            del self._children[child.index]
        self._memory.forget(child.index)
        self._past = added([self._past, lasting(child.families)])
        return _describe_exit(code)

    # -- metrics ---------------------------------------------------------------------------------------------------

    async def _answer(self, child: _Child, number: int) -> None:
        await self._ask_all()
        living = [one.families for one in self._children.values()]
        totals = added([*living, self._past, snapshot(self._registry)], SEEN_BY_ALL)
        child.link.send(Totals(number, totals))

    async def _ask_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            await self._ask_all()
            for child in self._children.values():
                if child.is_serving and time.monotonic() - child.heard_s > self._hung_s:
                    logger.error("process %d has not answered for %.0f s; it is killed", child.index, self._hung_s)
                    child.signal(signal.SIGKILL)

    async def _ask_all(self) -> None:
        """Get the metrics of all that serve; of those that do not answer, the last ones stay."""
        asked = [child for child in self._children.values() if child.is_serving]
        for child in asked:
            child.told.clear()
            child.link.send(TellMetrics())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                for child in asked:
                    await child.told.wait()


def _threads(num_processes: int) -> int:
    """Of each process's tokenizer, which otherwise has one for each core."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def _why_it_cannot_serve(child: _Child, how: str) -> KvrelayError:
    if child.failure is None:
        return ProcessesError(f"a process of the gateway ended before it served ({how}); its log has the reason")
    return (SettingsError if child.failure.is_setting else KvrelayError)(child.failure.detail)


def _first(errors: BaseExceptionGroup[KvrelayError]) -> KvrelayError:
    """All processes fail for the same reason, or the others are stopped for the first one's."""
    error = errors.exceptions[0]
    assert isinstance(error, KvrelayError), f"{errors} has groups in it"
    return error


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
