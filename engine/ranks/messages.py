"""The messages between a leader and its ranks' processes: plans in one direction, signs of life in the other. Also how ranks of
other hosts join.
"""

from __future__ import annotations

import msgspec

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.settings import Guessing, KvSettings, ModelSettings
from kvrelay.engine.step.interface import HeadAsk
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan

AGREE_S = 10.0  # how much later than others a rank may report its failure
TOGETHER_S = 30.0  # time for a rank to reach a point where others wait; with stages, for each stage
LOAD_S = 600.0  # how much longer than its leader a rank may take to start, and then to load, unless it reads on
START_S = 120.0  # time until a process's first sign of life: imports may come from a slow disk
ALIVE_S = 1.0  # interval of signs of life
THEIRS_S = 2.0  # time for the rank that has failed to be found, when another one could not continue without it
SILENT_S = 15.0  # a process that is silent for so long hangs; signs of life do not depend on what it computes


class LoadSettings(msgspec.Struct, frozen=True):
    """The settings of an engine, the same for each rank's part."""

    model: ModelSettings
    kv: KvSettings
    max_num_seqs: int | None  # see :func:`kvrelay.engine.settings.sequences_at_a_time`
    max_batched_tokens: int | None  # see :func:`kvrelay.engine.settings.prompt_step_tokens`
    decodes: bool
    reads_images: bool = False
    guessing: Guessing = Guessing()


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


class Draft(msgspec.Struct, frozen=True, tag=True):
    """Guess together with the leader."""

    asks: tuple[HeadAsk, ...]  # each with only those tokens that the slot does not have


class GiveUpDrafts(msgspec.Struct, frozen=True, tag=True):
    """Guess no more. There is no answer."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Record the next steps. There is no answer."""

    num_steps: int


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """From the last stage's first rank: a step's results, or why its tokens could not be sampled. In the order of steps."""

    results: list[RowResult] = []
    failed: str | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load your part of an adapter; see AdapterSlots.load. Other hosts have a folder of the same name in another directory."""

    slot: int
    directory: str
    digest: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free a slot. There is no answer: the next load follows it in order."""

    slot: int


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The part is loaded; or it failed, with the reason."""

    failed: str | None = None
    kind: str = ""  # of the failure; see :mod:`kvrelay.engine.ranks.adapters`


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The sender could not do the latest action. In both directions."""

    reason: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The next action needs all ranks; this one waits for ``Go``."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready."""

    told: bytes = b""  # see :class:`kvrelay.engine.models.ranks.Meet`


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The part is loaded, and the pool is in the memory that the leader gave."""

    card: ModelCard


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """The part cannot be loaded, and the rank ends."""

    reason: str
    may_be_theirs: bool  # see ``may_be_theirs``


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sent every second, whatever the rank computes."""

    num_meetings: int  # number of collectives that the rank has entered
    share_read: float = 0.0  # of its weights, while it loads


class Logged(msgspec.Struct, frozen=True, tag=True):
    """A line for the leader's log."""

    level: int
    text: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The rank's host is asked to end, and waits until the leader has finished its requests."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message on each of the two links of a rank on another host."""

    rank: int
    num_ranks: int
    num_nodes: int
    version: str  # of kvrelay
    life: str  # random for each process; identifies its two links
    place: str  # the process and its host, for logs
    carries_blocks: bool  # whether this is the link for blocks


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks are here; they meet at this port of the leader's host."""

    master_port: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The rank does not belong here; both links end."""

    reason: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A host's process tells its ranks that it is asked to end."""


FromLeader = Welcome | Refused
ToHost = Alive | Logged
ToRank = Load | Go | Launch | Sample | Copy | Draft | GiveUpDrafts | LoadAdapter | UnloadAdapter | Profile | Failed
FromRank = Ready | Loaded | NotLoaded | Alive | Logged | Stepped | AdapterLoaded | Failed | Leaving


def may_be_theirs(error: BaseException) -> bool:
    """Whether this may be the error of a collective that waited for a failed rank. The check of a model wraps it."""
    return isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
