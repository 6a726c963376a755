"""A whole deployment on this machine: for people (``kvrelay local``), and for programs (:class:`LocalDeployment`).

    with LocalDeployment.from_settings(LocalSettings.of(port=0), directory) as deployment:
        deployment.wait_ready(timeout_s=120)
        httpx.get(f"{deployment.url}/v1/models")

Stop order: the gateway (no new requests), prefill workers (hand-offs end), decode workers.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from kvrelay.common.cores import available_cores
from kvrelay.launcher.models import resolve_model, served_name
from kvrelay.launcher.plan import Plan, num_ports, plan_deployment
from kvrelay.launcher.ports import check_free, free_ports
from kvrelay.launcher.settings import LocalSettings
from kvrelay.launcher.supervisor import Observer, RestartPolicy, Status, Supervisor
from kvrelay.launcher.traffic import Traffic
from kvrelay.launcher.view import make_view

_POLL_S = 0.2  # how soon a signal is acted upon


class LogRecorder:
    """An observer that keeps all log lines, for deployments nobody watches."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def on_line(self, name: str, line: str) -> None:
        """Kept."""
        with self._lock:
            self._lines.append(f"{name} | {line}")

    def on_state(self, status: Status) -> None:
        """Kept as a line."""
        self.on_line("kvrelay", f"{status.name}: {status.state.value} {status.detail}")

    @property
    def text(self) -> str:
        """All lines so far."""
        with self._lock:
            return "\n".join(self._lines)

    def tail(self, count: int = 30) -> str:
        """The last lines."""
        with self._lock:
            return "\n".join(self._lines[-count:])


class LocalDeployment:
    """Gateway and workers as processes, from ``start`` (or enter) to ``stop`` (or exit)."""

    def __init__(self, plan: Plan, *, policy: RestartPolicy | None = None) -> None:
        """Nothing runs yet."""
        self.plan = plan
        self.log = LogRecorder()
        self._supervisor = Supervisor(plan.specs, policy=policy)

    @classmethod
    def from_settings(cls, settings: LocalSettings, model_directory: Path) -> Self:
        """Choose the ports. Raises PortTakenError."""
        front = settings.gateway
        if front.port:
            check_free(front.host, front.port)
        http_port, *ports = free_ports(1 + num_ports(settings), without=front.port)
        return cls(
            plan_deployment(
                settings,
                model_directory,
                http_port=front.port or http_port,
                ports=ports,
                num_cores=available_cores(),
            )
        )

    @property
    def url(self) -> str:
        """Of the HTTP API, such as ``http://127.0.0.1:8000``."""
        return self.plan.url

    @property
    def admin_urls(self) -> dict[str, str]:
        """By component name: what /health, /metrics and (of workers) /debug/kv are under."""
        return self.plan.admin_urls

    @property
    def pids(self) -> dict[str, int]:
        """By name, of the components that run now."""
        return {status.name: status.pid for status in self._supervisor.statuses() if status.pid is not None}

    def statuses(self) -> list[Status]:
        """All components."""
        return self._supervisor.statuses()

    def start(self, observer: Observer | None = None) -> None:
        """Start the processes; returns at once. ``observer`` hears what happens, instead of ``log``."""
        self._supervisor.start(observer or self.log)

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; whether all components take traffic. Raises ComponentDiedError."""
        return self._supervisor.is_ready(timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Until all components take traffic. Raises ComponentDiedError or NotReadyError."""
        self._supervisor.wait_ready(timeout_s)

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the deployment ends within ``timeout_s``. Raises ComponentDiedError if a component died too often."""
        return self._supervisor.wait_ended(timeout_s)

    def stop(self, timeout_s: float | None = None, *, hurry: bool = False) -> bool:
        """Stop everything in order; True when no process is left, False after ``timeout_s``."""
        return self._supervisor.stop(timeout_s, hurry=hurry)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class StopSignals:
    """Counts what asks us to stop. A handler may interrupt any line, also one that holds a lock: so it only counts."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Between enter and exit SIGINT, SIGTERM and SIGHUP (the terminal went away) are counted. Main thread only."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def run(settings: LocalSettings) -> int:
    """``kvrelay local``: serve until Ctrl-C, SIGTERM or a failure; returns 0 after an orderly stop.

    Raises PortTakenError before anything is loaded, ModelError, and ComponentDiedError after all others were stopped.
    """
    front = settings.gateway
    if front.port:
        check_free(front.host, front.port)
    directory = resolve_model(front.model, needs_weights=settings.components.get("engine") != "fake")
    name = front.served_model_name or served_name(front.model, directory)
    deployment = LocalDeployment.from_settings(settings, directory)
    text = ready_text(deployment.url, name, has_keys=front.api_keys is not None)
    return serve_until_stopped(deployment, text, hide_logs=settings.deployment.quiet)


def serve_until_stopped(deployment: LocalDeployment, when_ready: str, *, hide_logs: bool) -> int:
    """Start, show (``when_ready``, once all are), and stop in order at SIGINT, SIGTERM or SIGHUP; returns 0.

    Raises ComponentDiedError. Main thread only.
    """
    signals = StopSignals()
    view = make_view(deployment.statuses, Traffic(deployment.admin_urls), hide_logs=hide_logs)
    with signals.caught(), view:
        view.say(f"kvrelay: starting {', '.join(deployment.plan.admin_urls)} (Ctrl-C stops)")
        deployment.start(view)
        was_ready = False
        try:
            while not signals.count:
                if was_ready:
                    deployment.wait_ended(_POLL_S)
                elif deployment.is_ready(_POLL_S):
                    was_ready = True
                    view.say(when_ready)
        finally:
            _stop(deployment, signals)
            view.say("kvrelay: all processes have ended")
    return 0


def ready_text(url: str, model: str, *, has_keys: bool) -> str:
    """What to do next. ``has_keys``: the gateway asks for one."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages}).replace("'", "'\\''")
    # The certificate is for a name, and this is an address.
    insecure = " -k" if url.startswith("https") else ""
    key = ' \\\n    -H "Authorization: Bearer $API_KEY"' if has_keys else ""
    return (
        f"\nkvrelay is ready at {url} (API documentation: {url}/docs)\n"
        + ("API_KEY is to be one of the keys of --api-keys.\n" if has_keys else "")
        + f"\n  curl{insecure} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n"
    )


def _stop(deployment: LocalDeployment, signals: StopSignals) -> None:
    """Stop in order; one more Ctrl-C while that goes on ends the grace."""
    before = signals.count
    while not deployment.stop(_POLL_S, hurry=signals.count > before):
        pass
