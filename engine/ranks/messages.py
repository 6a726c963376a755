"""What a leader and the processes of its ranks tell each other: plans down, life signs up; and how those of other hosts come in."""

from __future__ import annotations

import msgspec

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.settings import KvSettings, ModelSettings
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan

AGREE_S = 10.0  # how much later than the others a rank may fail
TOGETHER_S = 30.0  # what a rank may take to come to where others wait for it; of stages, each
LOAD_S = 600.0  # how much longer than its leader a rank may take to start, and then to read its weights
START_S = 120.0  # before a process's first sign of life: what it imports may come from a slow disk
ALIVE_S = 1.0  # between signs of life
SILENT_S = 15.0  # every process gives them, whatever it computes; who gives none for so long hangs


class LoadSettings(msgspec.Struct, frozen=True):
    """What an engine is loaded by, each rank's part the same."""

    model: ModelSettings
    kv: KvSettings
    max_num_seqs: int | None  # see :func:`kvrelay.engine.settings.sequences_at_a_time`
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


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """Of several stages, the last one's first rank: what a step has brought, or why its tokens could not be sampled. In order."""

    results: list[RowResult] = []
    failed: str | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load your part of an adapter; see AdapterSlots.load. Other hosts have a folder of this name elsewhere."""

    slot: int
    directory: str
    digest: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free a slot. Nobody waits for it: the next load comes behind it."""

    slot: int


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The part is there; or not, and why."""

    failed: str | None = None
    kind: str = ""  # of the failure; see :mod:`kvrelay.engine.ranks.adapters`


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Whoever says so could not do the latest; both ways."""

    reason: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """What comes next takes all ranks: this one waits for ``Go``."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The part is there, and the pool in the memory that the leader gave."""

    card: ModelCard


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Every second, whatever the rank computes."""

    num_meetings: int  # collectives that it has entered


class Logged(msgspec.Struct, frozen=True, tag=True):
    """A line for the leader's log."""

    level: int
    text: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The rank's host is asked to end, and waits for the leader to finish what it has."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message on each of the two links of a rank on another host."""

    rank: int
    num_ranks: int
    num_nodes: int
    version: str  # of kvrelay
    life: str  # made anew by each process: what its two links have in common
    place: str  # the process and its host, for people
    carries_blocks: bool  # whether it is the link that blocks travel on


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks are here; they meet at this port of the leader's host."""

    master_port: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The rank does not belong here; both links end."""

    reason: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A host tells its ranks that it is asked to end."""


FromLeader = Welcome | Refused
ToHost = Alive | Logged
ToRank = Load | Go | Launch | Sample | Copy | LoadAdapter | UnloadAdapter | Failed
FromRank = Ready | Loaded | Alive | Logged | Stepped | AdapterLoaded | Failed | Leaving
