"""The parts that a worker of either role is built from, beside its engine and its scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.adapters import AdapterSettings
from kvrelay.worker.loop import ModelLoop


@dataclass(frozen=True, slots=True)
class Setup:
    """An entry point fills it from settings; the executor, tests and the simulation by hand."""

    worker_id: str
    epoch: int  # differs for every start of the process
    address: str  # of the control socket
    registry: CollectorRegistry
    network: Network  # which the worker closes
    model_loop: type[ModelLoop] = ModelLoop
    link_settings: LinkSettings = field(default_factory=LinkSettings)
    seal_kv: bool = False
    keys: WireKeys | None = None
    shared_memory: SharedPlace | None = None  # where workers on this host find each other; None: nowhere
    max_retained_share: float = 0.5
    guides: GuideCompiler = field(default_factory=NoGuides)
    adapters: AdapterSettings | None = None
    canary_period_s: float = 0.0  # how often an idle worker checks that it still computes the same; 0: never
    model: str = ""  # name in the API that gateways are told; "": none
