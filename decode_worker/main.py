"""Entry point of a decode worker process."""

from __future__ import annotations

import logging
import os
import socket
import time

from prometheus_client import CollectorRegistry

from kvrelay.common.logs import configure_logs
from kvrelay.common.process import Component, ProcessSettings, serve_process
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.factory import load_engine, load_guides
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.messages import Role
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import keys_of
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.progress import LoggedProgress

logger = logging.getLogger(__name__)


def serve(settings: DecodeSettings) -> int:
    """Run a decode worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    configure_logs(settings.log_level, settings.log_format)
    worker_id = settings.worker_id or f"decode-{socket.gethostname()}-{os.getpid()}"
    registry = CollectorRegistry()
    keys = keys_of(settings.security, Role.DECODE, (settings.address, settings.data_address))
    shared_memory = SharedPlace.of(settings.same_host)

    def load() -> Component:
        engine = load_engine(
            settings.model,
            settings.kv,
            settings.fake,
            max_num_seqs=settings.scheduler.max_num_seqs,
            max_batched_tokens=settings.scheduler.max_batched_tokens,
            decodes=True,
            progress=LoggedProgress(logger),
        )
        return DecodeWorker(
            engine,
            settings.scheduler,
            settings.address,
            settings.data_address,
            worker_id,
            registry,
            network=Network.open(settings.data.data_sockets),
            model_loop=ModelLoop,
            epoch=time.time_ns(),
            seal_kv=settings.security.seals_kv,
            keys=keys,
            shared_memory=shared_memory,
            data_sockets=settings.data.data_sockets,
            max_retained_share=settings.kv.max_retained_share,
            guides=load_guides(settings.model, settings.fake, engine.card.vocab_size),
        )

    process = ProcessSettings(settings.admin_host, settings.admin_port, settings.drain_s)
    return serve_process(load, process, registry, worker_id)
