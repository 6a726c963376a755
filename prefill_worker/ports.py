"""What the prefill worker's service speaks through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.prefill_worker.model_worker import Command
from kvrelay.wire.messages import Message, Role
from kvrelay.wire.transfers import TransferTable
from kvrelay.worker.loop import ModelLoop


@dataclass(slots=True)
class Ports:
    """Filled once by whoever assembles the worker."""

    send: Callable[[Role, str, Message], bool]
    loop: ModelLoop[Command]
    links: DecodeLinks
    transfers: TransferTable
    guides: GuideCompiler = field(default_factory=NoGuides)  # answers on the asyncio loop
