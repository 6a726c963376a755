"""Options of an executor with a model in this process: the components' own settings, by their names."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from kvrelay.gateway.settings import RelaySettings


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Of a worker in this process, and of the line in front of it."""

    model: ModelSettings
    kv: KvSettings
    fake: FakeSettings
    scheduler: DecodeSchedulerSettings
    relay: RelaySettings
