"""What the decode worker's service speaks through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.decode_worker.model_worker import Command
from kvrelay.decode_worker.welcome import DataPorts
from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import Message, Role
from kvrelay.worker.loop import ModelLoop


@dataclass(slots=True)
class Ports:
    """Filled once by whoever assembles the worker."""

    send: Callable[[Role, str, Message], bool]
    loop: ModelLoop[Command]
    leases: LeaseTable
    data: DataPorts
    guides: GuideCompiler = field(default_factory=NoGuides)  # answers on the asyncio loop
