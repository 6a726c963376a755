"""Entry point of a prefill worker process."""

from __future__ import annotations

from kvrelay.engine.step.interface import Engine
from kvrelay.prefill_worker.settings import PrefillSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import Role
from kvrelay.worker.main import serve_worker
from kvrelay.worker.setup import Setup


def serve(settings: PrefillSettings) -> int:
    """Run a prefill worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""

    def make(engine: Engine, setup: Setup) -> PrefillWorker:
        return PrefillWorker(engine, settings.scheduler, setup)

    return serve_worker(Role.PREFILL, settings, (settings.address,), make)
