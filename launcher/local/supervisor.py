"""Keeps a set of components running, as Kubernetes would: starts, watches, restarts, and stops them in order.

One thread owns all child processes, because the kernel ties a child to the thread that started it (see lifeline). Other threads
read :meth:`Supervisor.statuses` and wait. A component that dies before it was ever ready ends the deployment: a restart would fail
too. A component that dies later is restarted after a growing pause. Too many deaths in a row end the deployment.
"""

from __future__ import annotations

import contextlib
import enum
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Protocol

from kvrelay.launcher.errors import ComponentDiedError, NotReadyError
from kvrelay.launcher.local.process import Child, ComponentSpec, describe_exit

_READY_PROBE_S = 1.0  # interval for ready components; others are asked at every tick


class State(enum.Enum):
    """The state of a component."""

    LOADING = "loading"
    READY = "ready"
    UNREADY = "not ready"  # was ready; is overloaded now, or waits for another component
    DIED = "died"  # will be restarted
    STOPPED = "stopped"


_TRANSITIONS: dict[State, frozenset[State]] = {
    State.LOADING: frozenset({State.READY, State.DIED, State.STOPPED}),
    State.READY: frozenset({State.UNREADY, State.DIED, State.STOPPED}),
    State.UNREADY: frozenset({State.READY, State.DIED, State.STOPPED}),
    State.DIED: frozenset({State.LOADING, State.STOPPED}),
    State.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead component is restarted."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    stable_s: float = 30.0  # after this running time a death counts as the first one
    max_deaths: int = 5  # in a row; then the deployment ends

    def pause_s(self, num_deaths: int) -> float | None:
        """The pause after the ``num_deaths``-th death in a row (from 1); None: give up."""
        if num_deaths >= self.max_deaths:
            return None
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** (num_deaths - 1))


@dataclass(frozen=True, slots=True)
class Status:
    """A component's state for people."""

    name: str
    state: State
    pid: int | None
    state_s: float  # time in this state
    load_s: float | None  # time from start to ready
    rss_bytes: int | None
    num_restarts: int
    is_back: bool = False  # ready once more, and the same process
    detail: str = ""  # how it ended, in state DIED


class Observer(Protocol):
    """Receives events. Called on the supervisor's threads; must be fast and must not raise."""

    def on_line(self, name: str, line: str) -> None:
        """A component wrote a line."""

    def on_state(self, status: Status) -> None:
        """A component changed its state."""


@dataclass(slots=True, eq=False)
class _Component:
    spec: ComponentSpec
    child: Child | None = None
    state: State = State.LOADING
    since_s: float = 0.0
    load_s: float | None = None
    is_back: bool = False
    num_deaths: int = 0  # in a row
    num_restarts: int = 0
    restart_at_s: float = 0.0
    probe_at_s: float = 0.0
    detail: str = ""


class Supervisor:
    """Call ``start()``, ``wait_ready()`` or ``wait_ended()``, then ``stop()``, from any thread; ``stop`` may be repeated."""

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        *,
        policy: RestartPolicy | None = None,
        tick_s: float = 0.1,
    ) -> None:
        self._components = [_Component(spec) for spec in specs]
        self._observer: Observer  # set by ``start``
        self._policy = policy or RestartPolicy()
        self._tick_s = tick_s
        self._changed = threading.Condition()
        self._wake = threading.Event()  # ends the thread's wait between ticks
        self._is_stopping = False
        self._is_hurried = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, observer: Observer) -> None:
        """Start all components; returns at once. Call it once."""
        self._observer = observer
        self._thread.start()

    def statuses(self) -> list[Status]:
        """All components in their order."""
        with self._changed:
            return [self._status(component) for component in self._components]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all components are ready. Raises ComponentDiedError or NotReadyError, without stopping the others."""
        if not self.is_ready(timeout_s):
            waiting = [f"{item.name} ({item.state.value})" for item in self.statuses() if item.state is not State.READY]
            raise NotReadyError(f"not ready after {timeout_s:.0f} s: {', '.join(waiting)}")

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for all components; returns whether all are ready. Raises ComponentDiedError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._is_stopping or self._all_ready(), timeout_s
            )
            if self._failure is not None:
                raise self._failure
            return self._all_ready()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the deployment has failed or was asked to stop; False after ``timeout_s``. Raises the failure."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._failure is not None or self._is_stopping, timeout_s)
            if self._failure is not None:
                raise self._failure
            return ended

    def request_stop(self, *, hurry: bool) -> None:
        """Start to stop all components in order. ``hurry``: without grace, even if a slower stop has begun."""
        self._is_hurried = self._is_hurried or hurry
        self._is_stopping = True
        self._wake.set()

    def stop(self, timeout_s: float | None = None, *, hurry: bool = False) -> bool:
        """Stop all components in order. True when every process is gone, False after ``timeout_s``."""
        self.request_stop(hurry=hurry)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the supervisor's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for component in self._components:
                self._launch(component)
                self._observer.on_state(self._status(component))
            while not self._is_stopping and self._failure is None:
                for component in self._components:
                    self._look_after(component)
                self._wake.wait(self._tick_s)
        except Exception as error:  # waiting threads must get it, and the children must stop
            self._fail(error)
        finally:
            self._stop_all()
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()

    def _launch(self, component: _Component) -> None:
        component.child = Child(component.spec, self._observer.on_line)
        component.since_s = component.child.started_s
        component.load_s = None
        component.probe_at_s = 0.0

    def _look_after(self, component: _Component) -> None:
        if component.state is State.DIED:
            if time.monotonic() >= component.restart_at_s:
                component.num_restarts += 1
                self._launch(component)
                self._enter(component, State.LOADING)
            return
        assert component.child is not None, f"{component.spec.name} is {component.state} without a process"
        code = component.child.exit_code()
        if code is not None:
            self._on_death(component, component.child, code)
        elif time.monotonic() < component.probe_at_s:
            pass
        elif own_answer(component.spec.ready_url) is not None:
            component.probe_at_s = time.monotonic() + _READY_PROBE_S
            if component.state is not State.READY:
                component.is_back = component.load_s is not None
                if component.load_s is None:
                    component.load_s = time.monotonic() - component.child.started_s
                self._enter(component, State.READY)
        elif component.state is State.READY:
            self._enter(component, State.UNREADY)

    def _on_death(self, component: _Component, child: Child, code: int) -> None:
        how = describe_exit(code)
        component.detail = how
        was_ready = component.load_s is not None
        is_first = component.num_restarts == 0
        lived_s = time.monotonic() - child.started_s
        component.num_deaths = 1 if was_ready and lived_s >= self._policy.stable_s else component.num_deaths + 1
        self._enter(component, State.DIED)
        pause_s = self._policy.pause_s(component.num_deaths)
        if is_first and not was_ready:
            self._fail(_died(component.spec.name, f"died at start ({how})", child.tail))
        elif pause_s is None:
            text = f"died {component.num_deaths} times in a row (last: {how})"
            self._fail(_died(component.spec.name, text, child.tail))
        else:
            component.restart_at_s = time.monotonic() + pause_s

    def _stop_all(self) -> None:
        for rank in sorted({component.spec.stop_rank for component in self._components}):
            group = [item for item in self._components if item.spec.stop_rank == rank and item.child is not None]
            for component in group:
                assert component.child is not None
                component.child.terminate()
            for component in group:
                self._await_end(component)

    def _await_end(self, component: _Component) -> None:
        assert component.child is not None
        deadline_s = time.monotonic() + component.spec.grace_s
        while component.child.exit_code() is None:
            if self._is_hurried or time.monotonic() >= deadline_s:
                component.child.kill()
                break
            time.sleep(min(self._tick_s, 0.02))
        self._enter(component, State.STOPPED)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _enter(self, component: _Component, state: State) -> None:
        with self._changed:
            assert state in _TRANSITIONS[component.state], f"{component.spec.name}: {component.state} -> {state}"
            component.state = state
            component.since_s = time.monotonic()
        self._observer.on_state(self._status(component))  # before waiting threads wake, so that the log stays in order
        with self._changed:
            self._changed.notify_all()

    # -- what others see -------------------------------------------------------------------------------------------

    def _status(self, component: _Component) -> Status:
        child = component.child
        is_alive = child is not None and component.state not in (State.DIED, State.STOPPED)
        return Status(
            name=component.spec.name,
            state=component.state,
            pid=child.pid if child is not None and is_alive else None,
            state_s=time.monotonic() - component.since_s if component.since_s else 0.0,
            load_s=component.load_s,
            rss_bytes=child.rss_bytes() if child is not None and is_alive else None,
            num_restarts=component.num_restarts,
            is_back=component.is_back,
            detail=component.detail if component.state is State.DIED else "",
        )

    def _all_ready(self) -> bool:
        return all(component.state is State.READY for component in self._components)


def own_answer(url: str) -> str | None:
    """The answer of our own process at ``url`` within two seconds; None without a whole one, or if its status is not 200."""
    with contextlib.suppress(OSError, ValueError, HTTPException), _OPENER.open(url, timeout=2.0) as answer:
        return str(answer.read(), "utf-8") if answer.status == 200 else None
    return None


def _died(name: str, what: str, tail: list[str]) -> ComponentDiedError:
    lines = "".join(f"\n    {line}" for line in tail) or "\n    (it wrote nothing)"
    return ComponentDiedError(f"{name} {what}; its last lines:{lines}")


# These addresses are on this machine, so HTTP_PROXY is ignored. Certificates are for the name that clients use, so they are
# not checked: we started these processes.
_TLS = ssl.create_default_context()
_TLS.check_hostname, _TLS.verify_mode = False, ssl.CERT_NONE
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_TLS))
