"""The interface between workers and the model: an ``Engine`` runs steps, and its ``BlockStore`` gives access to block bytes.

Workers import this room and :mod:`kvrelay.engine.kv.block_manager`, never a tensor. There are two implementations:
:class:`kvrelay.engine.torch_engine.TorchEngine` (the real one) and :class:`kvrelay.engine.fake.engine.FakeEngine`. Workers launch
steps through :class:`kvrelay.engine.step.leader.Leader`, which turns their rows into plans.

Threads: only the model thread launches steps. Any thread may call ``BlockStore`` methods, but ``open_write`` may wait. The caller
must hold a lease or a sequence's reference, which guarantees that no step computes on a block while it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvrelay.common.adapter_files import AdapterFiles
from kvrelay.common.errors import KvrelayError
from kvrelay.common.late_bytes import LateBytes, Register
from kvrelay.common.model_card import ModelCard
from kvrelay.engine.step.plan import RowResult, SamplingInputs, StepPlan
from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's share of a step, as its scheduler sees it: ``num_tokens`` tokens from ``sequence.num_computed_tokens`` on.

    The row samples a token if and only if the step computes the sequence's last token. ``sequence.block_tables`` must already cover
    the computed tokens.

    ``num_ahead``: tokens after ``sequence.num_computed_tokens`` that a running step computes; this row starts after them. If these
    are all of the sequence's tokens, the row is *fed*: its token is the one that the running step samples, which the host does not
    know yet (see ``Leader.launch``). Otherwise the row is a prompt's next chunk. Both properties are those at the launch.

    ``draft``: a guess at the tokens after the sequence's last one, which must be the row's token. The step also computes the draft,
    and samples after each of its tokens. The result has the sampled tokens up to the first wrong guess: at least one, and at most
    one more than the draft. So they are the tokens of steps without a draft. K/V after the tokens that count are overwritten by the
    next step; the block table must cover them. No row may depend on such a step while it runs.

    If ``sequence.sampling.num_prompt_logprobs`` is set, the result has an entry for each prompt token that the row's tokens predict
    (a row over tokens ``s`` to ``e`` predicts ``s + 1`` to ``e + 1``) and that ``sequence.prompt_logprobs`` does not have.
    """

    sequence: Sequence
    num_tokens: int
    num_ahead: int = 0
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the step samples a token for this row."""
        return self.is_fed or self.num_ahead + self.num_tokens == self.sequence.num_uncomputed_tokens

    @property
    def is_fed(self) -> bool:
        """Whether the step in front samples its token."""
        return 0 < self.num_ahead == self.sequence.num_uncomputed_tokens


class LaunchedStep(Protocol):
    """A running step.

    Its sampling is launched with it, unless it is *deferred*: then its plan came without the sampling's inputs.
    """

    @property
    def is_deferred(self) -> bool:
        """Whether ``sample`` must still be called."""

    def sample(self, inputs: SamplingInputs) -> None:
        """Launch the sampling of a deferred step, once, before the next plan. It waits for the device if its rows require that."""

    def wait(self) -> list[RowResult]:
        """One result for each row of the plan; waits for them. Everything that the step wrote is then visible. Call it once.

        For a deferred step it raises AssertionError, after the step has written its last block.
        """


class BlockStore(Protocol):
    """Byte access to the KV pool by physical block, for shipping and receiving.

    On a CPU the views are the pool's own memory. On a GPU they are pinned staging memory: a reader copies out through the object
    that ``open_read`` returns, ``close_write`` begins to copy in, and steps wait by themselves.
    """

    @property
    def num_blocks(self) -> int:
        """Physical blocks in the pool."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of one physical block: all layers of the largest group, K and V."""

    @property
    def register(self) -> Register | None:
        """Lets copies to and from other memory go there directly; None without a device that moves whole blocks by itself."""

    def open_read(self, block_id: int, group: int) -> memoryview | LateBytes:
        """The block's bytes (flat, ``block_nbytes``), or a promise of them; they do not change until ``close_read``. Never waits.

        ``group``: the group that the physical block is in. The step that computed it must have returned. The caller must hold the
        block. Or it closes the read before the block is taken for other content, and then uses nothing of what it read.
        """

    def close_read(self, block_id: int) -> None:
        """The caller no longer reads the bytes of ``open_read``. It may release the block."""

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """Begin to write the block's first bytes. ``payload`` must not change until the result is called, once.

        That waits until they are there, and returns the digests of what is there (:mod:`kvrelay.common.block_digests`). If the
        device that has the pool can hash, it makes them from its own memory. Every step launched afterwards sees the bytes. The
        caller must own the block, and no step may compute on it. This may wait, too: call it on a receiver's thread without a lock.
        Both raise RuntimeError if the bytes cannot be copied.
        """

    def open_write(self, block_id: int, group: int) -> memoryview:
        """A writable view (flat, ``block_nbytes``) to fill. ``group``: the group that the physical block is in.

        The caller must own the block, and no step may compute on it. On a GPU this may wait for an earlier copy, so call it on a
        receiver's thread without a lock. Raises RuntimeError if that copy failed.
        """

    def close_write(self, block_id: int) -> None:
        """The view is filled and verified (or abandoned): every step launched from now on sees it.

        Raises RuntimeError if it cannot be copied. If the copy fails later, the next steps fail.
        """


class DeviceFailedError(KvrelayError):
    """The device that computes steps has failed for good: no step of this process will ever succeed again."""


class AdapterSlots(Protocol):
    """An engine's slots for adapters, from 1 on. May be called beside steps, on any thread, one call at a time."""

    @property
    def num_slots(self) -> int:
        """The number of slots."""

    def nbytes(self, files: AdapterFiles) -> int:
        """The memory that an adapter would take."""

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """Read an adapter into a free slot; rows of later plans may then name it. Waits for the disk.

        Raises AdapterError if this model cannot serve it, AdapterAbsentError if the files have another digest. The slot then stays
        free.
        """

    def unload(self, slot: int) -> None:
        """Free a slot. No running step may have its rows, and no plan may name it before the next ``load``."""


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """A text for a head to continue. The engine has computed all tokens except the last one, in the given slot."""

    slot: int
    token_ids: Seq[int]  # prompt and output; read before the call returns
    num_wanted: int


class DraftHead(Protocol):
    """A head beside a loaded model, which guesses tokens from the model's hidden states. Use it on the model thread only."""

    def can_draft(self, slot: int, num_tokens: int) -> bool:
        """Whether the head has seen enough of the slot's text to continue after ``num_tokens`` tokens."""

    def draft(self, asks: Seq[HeadAsk]) -> list[tuple[int, ...]]:
        """Guesses for each ask: as many as wanted, or none. The asks' slots must differ. One step of the head per token of the
        longest guess.

        They are sampled with the slot's parameters and noise, but without guides, processors, bias and forbidden tokens.
        """

    def give_up(self) -> None:
        """Stop drafting: steps keep nothing for the head from now on."""


class Profiler(Protocol):
    """Records what steps take, for people."""

    def ask(self, num_steps: int) -> str | None:
        """Record the next ``num_steps`` steps on all ranks, once there are any. Any thread; never waits.

        Each rank writes a trace to a fresh directory of its host, and logs its path. Returns the pattern of these paths; None while
        a recording is under way.
        """

    def give_up(self) -> None:
        """Stop a recording that is under way, without a trace. On the thread that computes, when no step follows."""


class Engine(Protocol):
    """A loaded model with its KV pool."""

    @property
    def profiler(self) -> Profiler | None:
        """What records steps; None for an engine without torch."""

    @property
    def adapters(self) -> AdapterSlots | None:
        """The slots for adapters; None if the engine was started without them."""

    @property
    def card(self) -> ModelCard:
        """The model and its limits, as announced to peers."""

    @property
    def store(self) -> BlockStore:
        """The pool's bytes."""

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks inside the pool, as (source, target). The next step sees the copies.

        All sources are read before any target is written; no target may occur twice. Model thread only.
        """

    def check_device(self) -> None:
        """After a failed step: raise DeviceFailedError if the device failed, and not only this step's input.

        Waits for the device. Model thread only.
        """

    def not_live(self) -> list[str]:
        """Why no step will ever succeed again, as far as known without running one. Any thread; never waits."""

    def close(self) -> None:
        """End everything that it runs outside of this process. No step may run, and no block may be open."""

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are worth launching while the one before them runs."""

    @property
    def num_stages(self) -> int:
        """The number of stages, and so of steps (of different sequences) that should be under way."""

    @property
    def num_slots(self) -> int:
        """The number of sequences that it keeps state of; plans number the slots from 0."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step with at least one row, and return before it is done.

        Steps run in the order of their launches. At most two are under way, or ``num_stages`` if that is more. When the next step
        is launched, none may still be deferred, unless its plan ``resets``. With several stages no row is fed. Raises ValueError on
        a row without tokens, or with more tokens than its slot or its block table has. The next plan must then reset. Model thread
        only.
        """
