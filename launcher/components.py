"""Runs one component in this process: finds its model's directory, then calls its ``serve`` until a signal comes."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import TYPE_CHECKING, TypeVar

from kvrelay.launcher.models import resolve_model, with_directories

if TYPE_CHECKING:
    from kvrelay.decode_worker.settings import DecodeSettings
    from kvrelay.gateway.settings import GatewaySettings
    from kvrelay.prefill_worker.settings import PrefillSettings

    Worker = TypeVar("Worker", DecodeSettings, PrefillSettings)


def run_gateway(settings: GatewaySettings) -> int:
    """Serve HTTP until SIGTERM; returns the exit code."""
    _end_at_sigterm()
    from kvrelay.gateway.main import serve  # noqa: PLC0415 - each component imports only what it needs

    directories = [resolve_model(model.path, needs_weights=False) for model in settings.named_models()]
    return serve(dataclasses.replace(settings, **with_directories(settings, directories)))


def run_prefill_worker(settings: PrefillSettings) -> int:
    """Compute prompts until SIGTERM; returns the exit code."""
    _end_at_sigterm()
    from kvrelay.prefill_worker.worker import serve  # noqa: PLC0415

    return serve(_with_directory(settings))


def run_decode_worker(settings: DecodeSettings) -> int:
    """Generate until SIGTERM; returns the exit code."""
    _end_at_sigterm()
    from kvrelay.decode_worker.worker import serve  # noqa: PLC0415
    from kvrelay.engine.ranks.nodes import place_of  # noqa: PLC0415

    settings = _with_directory(settings)
    draft_model, place = settings.scheduler.draft_model, place_of(settings.nodes, settings.model.num_ranks)
    if draft_model is not None and (place is None or place.node_rank == 0):  # other nodes' ranks have no draft model
        is_model = settings.scheduler.speculation != "head"
        directory = resolve_model(draft_model, needs_tokenizer=is_model)
        scheduler = dataclasses.replace(settings.scheduler, draft_model=str(directory))
        settings = dataclasses.replace(settings, scheduler=scheduler)
    return serve(settings)


def _end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, until the component handles it.

    It is the first process of a container, where the kernel ignores a signal without a handler. Without this one, a pod that is
    deleted while it downloads its model would stay for its whole grace period.
    """
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))  # a download's threads wait for nobody


def _with_directory(settings: Worker) -> Worker:
    directory = str(resolve_model(settings.model.model, needs_weights=not settings.fake.is_fake))
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, model=directory))
