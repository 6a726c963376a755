"""Entry point of a decode worker process."""

from __future__ import annotations

from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.step.interface import Engine
from kvrelay.wire.messages import Role
from kvrelay.worker.main import serve_worker
from kvrelay.worker.setup import Setup


def serve(settings: DecodeSettings) -> int:
    """Run a decode worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""

    def make(engine: Engine, setup: Setup) -> DecodeWorker:
        return DecodeWorker(engine, settings.scheduler, settings.data_address, setup)

    return serve_worker(Role.DECODE, settings, (settings.address, settings.data_address), make)
