"""A whole deployment on this machine, for people (``kvrelay local``) and for programs (:class:`LocalDeployment`).

    with LocalDeployment.from_settings(LocalSettings.of(port=0), directory) as deployment:
        deployment.wait_ready(timeout_s=120)
        httpx.get(f"{deployment.url}/v1/models")

Components stop in order: the gateway (no new requests), prefill workers (hand-offs end), decode workers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console

from kvrelay.common.system import available_cores
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.launcher.local.gpus import visible_gpus
from kvrelay.launcher.local.plan import Plan, num_ports, plan_deployment
from kvrelay.launcher.local.ports import check_free, free_ports
from kvrelay.launcher.local.supervisor import Status, Supervisor
from kvrelay.launcher.local.view import View
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings
from kvrelay.launcher.top import Picture

_POLL_S = 0.2  # the longest delay before a signal is handled


class LogRecorder:
    """An observer that keeps all log lines, for deployments without a view."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_line(self, name: str, line: str) -> None:
        """Keep the line."""
        self.lines.append(f"{name} | {line}")

    def on_state(self, status: Status) -> None:
        """Keep the state as a line."""
        self.on_line("kvrelay", f"{status.name}: {status.state.value} {status.detail}")


class LocalDeployment(Supervisor):
    """Gateway and workers as processes, from ``start`` (or enter) to ``stop`` (or exit)."""

    def __init__(self, plan: Plan) -> None:
        """Starts no process yet."""
        super().__init__(plan.specs)
        self.plan = plan
        self.url = plan.url  # of the HTTP API, such as ``http://127.0.0.1:8000``
        self.admin_urls = plan.admin_urls  # base URL by component name, of /health, /metrics and (workers) /debug/kv
        self.log = LogRecorder()

    @classmethod
    def from_settings(cls, settings: LocalSettings, *model_directories: Path) -> Self:
        """Choose the ports and plan. ``model_directories``: in the order of ``--model``. Raises PortTakenError, SettingsError."""
        front = settings.gateway
        http_port, *ports = free_ports(1 + num_ports(settings), without=front.port)
        return cls(
            plan_deployment(
                settings,
                *model_directories,
                http_port=front.port or http_port,
                ports=ports,
                num_cores=available_cores(),
                gpus=_gpus(settings),
            )
        )

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running components, by name."""
        return {status.name: status.pid for status in self.statuses() if status.pid is not None}

    def __enter__(self) -> Self:
        self.start(self.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class StopSignals:
    """Counts stop signals. It only counts, because a handler may interrupt any line, even one that holds a lock."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP (a closed terminal) inside the context. Main thread only."""
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
    """``kvrelay local``: serve until Ctrl-C, SIGTERM or a failure. Returns 0 after an orderly stop.

    Raises PortTakenError before it loads anything, ModelError, and ComponentDiedError after it has stopped all other components.
    """
    front = settings.gateway
    if front.port:
        check_free(front.host, front.port)
    needs_weights = settings.components.get("engine") != "fake"
    directories = [resolve_model(model.path, needs_weights=needs_weights) for model in front.named_models()]
    deployment = LocalDeployment.from_settings(settings, *directories)
    text = ready_text(
        deployment.url,
        *deployment.plan.model_names,
        has_keys=front.api_keys is not None,
        chats=bool(ChatTemplate.load(directories[0], {}).source),
    )
    return serve_until_stopped(deployment, text, hide_logs=settings.deployment.quiet)


def serve_until_stopped(deployment: LocalDeployment, when_ready: str, *, hide_logs: bool) -> int:
    """Start all components, show ``when_ready`` once all are ready, and stop in order at SIGINT, SIGTERM or SIGHUP. Returns 0.

    Raises ComponentDiedError. Main thread only.
    """
    signals = StopSignals()
    view = View(Console(), deployment.statuses, Picture(deployment.url), hide_logs=hide_logs)
    with signals.caught(), view.shown():
        view.say(f"kvrelay: starting {', '.join(deployment.plan.admin_urls)} (Ctrl-C stops)")
        if deployment.plan.gpus:
            view.say(f"kvrelay: {deployment.plan.gpus}")
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


def ready_text(url: str, *models: str, has_keys: bool, chats: bool = True) -> str:
    """What to do next. ``models``: their names. ``has_keys``: the gateway requires an API key. ``chats``: the first model can."""
    route, prompt = "completions", {"max_tokens": 16, "prompt": "The capital of France is"}
    if chats:
        route, prompt = (
            "chat/completions",
            {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        )
    body = json.dumps({"model": models[0], "temperature": 0, **prompt}).replace("'", "'\\''")
    # The certificate is for a name, but this URL has an address.
    insecure = " -k" if url.startswith("https") else ""
    key = ' \\\n    -H "Authorization: Bearer $API_KEY"' if has_keys else ""
    return (
        f"\nkvrelay is ready at {url} (API documentation: {url}/docs)\n"
        + (f"Models: {', '.join(models)}\n" if len(models) > 1 else "")
        + ("API_KEY is to be one of the keys of --api-keys.\n" if has_keys else "")
        + f"\n  curl{insecure} {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n"
    )


def _gpus(settings: LocalSettings) -> tuple[str, ...]:
    """The GPUs that workers may use."""
    chosen = settings.components
    uses_none = chosen.get("device") == "cpu" or chosen.get("engine") == "fake"
    return () if uses_none else visible_gpus(os.environ)


def _stop(deployment: LocalDeployment, signals: StopSignals) -> None:
    """Stop in order. A further signal meanwhile ends the grace period."""
    before = signals.count
    while not deployment.stop(_POLL_S, hurry=signals.count > before):
        pass
