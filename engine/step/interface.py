"""The door between the workers and the model: an ``Engine`` runs steps, its ``BlockStore`` hands out block bytes.

Workers import this room and :mod:`kvrelay.engine.kv.block_manager`, never a tensor. Two implementations exist:
:class:`kvrelay.engine.torch_engine.TorchEngine` (the real one) and :class:`kvrelay.engine.fake.engine.FakeEngine`.

Workers launch steps through :class:`kvrelay.engine.step.leader.Leader`, which makes an engine's plans of their rows.

Threads: steps are launched on the model thread only. ``BlockStore`` methods may be called from any thread, ``open_write`` only
where waiting does not hurt; the caller guarantees, by holding a lease or a sequence's reference, that nobody computes on a block
that is being written.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvrelay.common.adapter_files import AdapterFiles
from kvrelay.common.errors import KvrelayError
from kvrelay.common.late_bytes import LateBytes
from kvrelay.common.model_card import ModelCard
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan
from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's share of a step, as its scheduler has it: ``num_tokens`` tokens from ``sequence.num_computed_tokens`` on.

    The row samples a token exactly if the step computes the sequence's last token. ``sequence.block_tables`` must already cover
    the computed tokens.

    ``num_ahead``: how many tokens behind ``sequence.num_computed_tokens`` a step that still runs computes; this row starts behind
    those. If these are all that the sequence has, the row is *fed*: its token is the one that step samples, and that nobody knows
    yet (see ``Leader.launch``). Else it is a prompt's next chunk. Both properties are of the time of the launch.

    ``draft``: a guess at the tokens behind the sequence's last one, which the row computes. The step computes the draft, too, and
    samples behind each of its tokens. The result has the tokens that were sampled as long as the draft was right: one at least,
    and one more than draft tokens at most. So they are what steps without a draft sample. K/V behind the tokens that count are
    left over, and overwritten by the next step; the block table must cover them. No row can follow from a step that still runs.

    If ``sequence.sampling.num_prompt_logprobs`` is set, the result has an entry for each prompt token that the row's tokens predict
    (a row over tokens ``s`` to ``e`` predicts ``s + 1`` to ``e + 1``) and that ``sequence.prompt_logprobs`` does not have.
    """

    sequence: Sequence
    num_tokens: int
    num_ahead: int = 0
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the step yields a token for this row."""
        return self.is_fed or self.num_ahead + self.num_tokens == self.sequence.num_uncomputed_tokens

    @property
    def is_fed(self) -> bool:
        """Whether its token is sampled by the step in front."""
        return 0 < self.num_ahead == self.sequence.num_uncomputed_tokens


class LaunchedStep(Protocol):
    """A step under way. Its sampling is launched with it, unless it is *deferred*: its plan came without what that needs."""

    @property
    def is_deferred(self) -> bool:
        """Whether the step still has to be told to ``sample``."""

    def sample(self, inputs: SamplingInputs) -> None:
        """Launch the sampling of a deferred step, once, before the next plan; it waits for the device if its rows ask for that."""

    def wait(self) -> list[RowResult]:
        """One result for each row of the plan, once they are there: everything that the step wrote is then visible. Call it once.

        Of a deferred step it raises AssertionError, when the step writes to no block any more.
        """


class BlockStore(Protocol):
    """Byte access to the KV pool, physical block by physical block, for shipping and receiving.

    On CPU the views are the pool's own memory. On a GPU they are pinned staging memory: ``open_read`` begins to copy out and
    ``close_write`` to copy in, and neither waits for the copy. Whoever reads waits, by the read; steps wait by themselves.
    """

    @property
    def num_blocks(self) -> int:
        """Physical blocks in the pool."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of one physical block: all layers of the largest group, K and V."""

    def open_read(self, block_id: int, group: int) -> memoryview | LateBytes:
        """The block's bytes (flat, ``block_nbytes``), or their promise; stable until ``close_read``. Never waits.

        ``group``: whose physical block it is. The caller holds the block, and the step that computed it has returned.
        """

    def close_read(self, block_id: int) -> None:
        """The caller no longer reads what ``open_read`` gave, or never did. It may let go of the block."""

    def open_write(self, block_id: int, group: int) -> memoryview:
        """A writable view (flat, ``block_nbytes``) to fill. ``group``: whose physical block it is.

        The caller owns the block; nobody computes on it. On a GPU it may wait for an earlier copy: on a receiver's thread, with no
        lock held. Raises RuntimeError if that failed.
        """

    def close_write(self, block_id: int) -> None:
        """The view is filled and verified (or abandoned): every step that is launched from now on sees it.

        Raises RuntimeError if it cannot be copied. If the copy fails later on, the next steps fail.
        """


class DeviceFailedError(KvrelayError):
    """The device that computes steps has failed for good: no step of this process will ever succeed again."""


class AdapterSlots(Protocol):
    """An engine's places for adapters, from 1 on. Beside steps, one call at a time, on any thread."""

    @property
    def num_slots(self) -> int:
        """How many there are."""

    def nbytes(self, files: AdapterFiles) -> int:
        """Memory that an adapter would take."""

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """Read an adapter into a free slot; rows of later plans may name it. Waits for the disk.

        Raises AdapterError if this model cannot serve it, AdapterAbsentError if other files lie there. The slot stays free.
        """

    def unload(self, slot: int) -> None:
        """Free a slot. No step has its rows, and no later plan names it before another ``load``."""


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """A text that a head is to go on with. The engine has computed all tokens but the last one, in a slot of its own."""

    slot: int
    token_ids: Seq[int]  # of prompt and output, read before the call returns
    num_wanted: int


class DraftHead(Protocol):
    """A head beside a loaded model, which guesses tokens from the model's hidden states. Model thread only."""

    def can_draft(self, slot: int, num_tokens: int) -> bool:
        """Whether it has seen enough of the slot's text to go on behind so many tokens."""

    def draft(self, asks: Seq[HeadAsk]) -> list[tuple[int, ...]]:
        """Guesses for each, of different slots: as many as wanted, or none. One step of the head for each token of the longest.

        They are sampled by the slot's parameters and noise, but for guides, processors, bias and forbidden tokens.
        """

    def give_up(self) -> None:
        """There are no drafts any more, and steps keep nothing for them."""


class Engine(Protocol):
    """A loaded model with its KV pool."""

    @property
    def adapters(self) -> AdapterSlots | None:
        """Where adapters are loaded; None: it was started for none."""

    @property
    def card(self) -> ModelCard:
        """Model and limits, as announced to peers."""

    @property
    def store(self) -> BlockStore:
        """The pool's bytes."""

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks inside the pool, (source, target) each; the next ``step`` sees the copies.

        All sources are read before any target is written; no target may come twice. Model thread only.
        """

    def check_device(self) -> None:
        """Behind a failed step: raise DeviceFailedError if it was the device that failed, and not only what it was given.

        Waits for the device. Model thread only.
        """

    def not_live(self) -> list[str]:
        """Why no step will ever succeed again, as far as that is known without one. Any thread; never waits."""

    def close(self) -> None:
        """End what it runs beside this process. No step runs, and no block is open, from then on."""

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are worth launching while the one before them runs."""

    @property
    def num_stages(self) -> int:
        """How many steps it computes side by side, one in each stage, and so are worth having under way; of different sequences."""

    @property
    def num_slots(self) -> int:
        """How many sequences it keeps something of; a plan names them from 0."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step, of one row at least, and return before it is done.

        Steps run in the order of their launches; two at most are under way, or ``num_stages`` if these are more. None may be
        deferred when the next one is launched, but one that ``resets``. With several stages no row is fed.

        Raises ValueError on a row of no tokens, or of more than its tokens or its block table hold. The next plan then ``resets``.
        Model thread only.
        """
