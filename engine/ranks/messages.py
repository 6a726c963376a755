"""What a leader and the processes of its ranks tell each other, on one host: plans down, life signs up."""

from __future__ import annotations

import msgspec

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.settings import KvSettings, ModelSettings
from kvrelay.engine.step.plan import SamplingInputs, StepPlan

AGREE_S = 10.0  # how much later than the others a rank may fail


class LoadSettings(msgspec.Struct, frozen=True):
    """What an engine is loaded by, each rank's part the same."""

    model: ModelSettings
    kv: KvSettings
    max_num_seqs: int
    max_batched_tokens: int | None  # see :func:`kvrelay.engine.settings.prompt_step_tokens`
    decodes: bool


class Load(msgspec.Struct, frozen=True, tag=True):
    """Join the group and load your part."""

    settings: LoadSettings


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Compute a step."""

    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Sample what the deferred step computed."""

    inputs: SamplingInputs


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy whole blocks, (source, target) each."""

    pairs: tuple[tuple[int, int], ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Whoever says so could not do the latest; both ways."""

    reason: str = ""


class Joining(msgspec.Struct, frozen=True, tag=True):
    """The process is up, and about to join the group."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The part is there, and the pool in the memory that the leader gave."""

    card: ModelCard


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Nothing else, every second."""


class Logged(msgspec.Struct, frozen=True, tag=True):
    """A line for the leader's log."""

    level: int
    text: str


ToRank = Load | Launch | Sample | Copy | Failed
FromRank = Joining | Loaded | Alive | Logged | Failed
