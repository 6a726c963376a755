"""The process of a worker of either role: sets up logs, keys and model, then runs the worker until a signal."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from kvrelay.common.logs import configure_logs
from kvrelay.engine.factory import load_engine, load_guides, load_images
from kvrelay.engine.load_progress import LoggedProgress
from kvrelay.engine.ranks.nodes import OtherNodes, place_of
from kvrelay.engine.settings import Guessing
from kvrelay.engine.step.interface import Engine
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.messages import Role
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import keys_of
from kvrelay.wire.sockets import check_listenable
from kvrelay.worker.adapters import AdapterSettings
from kvrelay.worker.nodes import Leaving, node_addresses, ranks_secret, serve_ranks
from kvrelay.worker.process.run import Component, ProcessSettings, serve_process
from kvrelay.worker.settings import WorkerSettings
from kvrelay.worker.setup import Setup

logger = logging.getLogger(__name__)


def serve_worker(
    role: Role,
    settings: WorkerSettings,
    listens_at: Mapping[str, str],
    make: Callable[[Engine, Setup], Component],
    load_before: Callable[[], Guessing] = Guessing,
    *,
    reads_images: bool = True,
) -> int:
    """Run the worker that ``make`` builds until SIGTERM or SIGINT. Returns the exit code. Raises KvrelayError if it cannot start.

    ``listens_at``: its addresses, by the settings that have them.
    ``load_before``: loads what must get its memory before the model's KV pool takes the rest, and returns what will guess tokens in
    the engine. ``reads_images``: if the model does.
    """
    configure_logs(settings.log_level, settings.log_format)
    place = place_of(settings.nodes, settings.model.num_ranks)
    if place is not None and place.node_rank > 0:
        return serve_ranks(role, settings, place)
    worker_id = settings.worker_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    registry = CollectorRegistry()
    for setting, address in listens_at.items():
        check_listenable(address, setting)
    keys = keys_of(settings.security, role, (*listens_at.values(), *node_addresses(place)))
    leaving = Leaving()
    nodes = None if place is None else OtherNodes(place, ranks_secret(keys), leaving.because)
    shared_memory = SharedPlace.of(settings.same_host)

    def load() -> Component:
        guessing = load_before()
        engine = load_engine(
            settings.model,
            settings.kv,
            settings.fake,
            max_num_seqs=settings.scheduler.max_num_seqs,
            max_batched_tokens=settings.scheduler.max_batched_tokens,
            decodes=role is Role.DECODE,
            reads_images=reads_images,
            progress=LoggedProgress(logger, time.monotonic),
            nodes=nodes,
            guessing=guessing,
        )
        setup = Setup(
            worker_id,
            time.time_ns(),
            settings.address,
            registry,
            Network.open(),
            model=settings.served_model_name or "",
            seal_kv=settings.security.seals_kv,
            keys=keys,
            shared_memory=shared_memory,
            max_retained_share=settings.kv.max_retained_share,
            guides=load_guides(settings.model, settings.fake, engine.card.vocab_size),
            images=load_images(settings.model, settings.fake, engine.card),
            adapters=AdapterSettings.of(settings.model),
            canary_period_s=settings.canary_period_s,
        )
        return make(engine, setup)

    process = ProcessSettings(settings.admin_host, settings.admin_port, settings.drain_s, leaving.is_set)
    return serve_process(load, process, registry, worker_id)
