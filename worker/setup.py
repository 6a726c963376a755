"""The common parts of both roles' workers, besides the engine and the scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.engine.images.interface import ImageReader
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.adapters import AdapterSettings
from kvrelay.worker.loop import ModelLoop


@dataclass(frozen=True, slots=True)
class Setup:
    """Filled from settings by entry points; by hand in the executor, tests and the simulation."""

    worker_id: str
    epoch: int  # differs for every start of the process
    address: str  # of the control socket
    registry: CollectorRegistry
    network: Network  # the worker closes it
    model_loop: type[ModelLoop] = ModelLoop
    link_settings: LinkSettings = field(default_factory=LinkSettings)
    seal_kv: bool = False
    keys: WireKeys | None = None
    shared_memory: SharedPlace | None = None  # where to find workers on this host; None: not used
    max_retained_share: float = 0.5
    host_kv_bytes: int = 0  # host memory for KV blocks that leave the pool; 0: none
    guides: GuideCompiler = field(default_factory=NoGuides)
    adapters: AdapterSettings | None = None
    images: ImageReader | None = None  # None: prompts have no images here
    canary_period_s: float = 0.0  # how often an idle worker checks itself; 0: never
    model: str = ""  # name in the API, sent to gateways; "": none
