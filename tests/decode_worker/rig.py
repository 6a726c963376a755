"""The decode worker's model thread without the thread, for engines that run ahead: what it tells, and who owns which block then."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import root_hash
from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.model_worker import Add, DecodeModelWorker, Report
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.interface import BlockStore, Engine, LaunchedStep, StepRow
from kvrelay.engine.metrics import EngineMetrics
from kvrelay.engine.sequence import GuideState, Sequence


class Watched:
    """An engine that notes how many steps are under way when one is launched. Implements Engine."""

    def __init__(self, engine: Engine) -> None:
        self.depths: list[int] = []
        self._engine = engine

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    @property
    def store(self) -> BlockStore:
        return self._engine.store

    @property
    def runs_ahead(self) -> bool:
        return self._engine.runs_ahead

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        self._engine.copy_blocks(pairs)

    def check_device(self) -> None:
        self._engine.check_device()

    def launch(self, rows: Seq[StepRow], behind: LaunchedStep | None = None) -> LaunchedStep:
        self.depths.append(0 if behind is None else 1)
        return self._engine.launch(rows, behind)

    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        return self._engine.step(rows)


class Rig:
    """A model worker without its thread, and a lease that takes and scribbles over what is free."""

    def __init__(self, engine: Engine, num_blocks: int | None = None, **settings: int) -> None:
        card = engine.card
        self.engine = Watched(engine)
        self.blocks = BlockManager(num_blocks or card.num_blocks, card.layout.block_size)
        self.scheduler = DecodeScheduler(
            DecodeSchedulerSettings(**settings), self.blocks, root_hash(card.layout.fingerprint()), card.max_model_len
        )
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.failed: list[str] = []
        self.metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.worker = DecodeModelWorker(self.engine, self.scheduler, self.metrics, self._hear)
        self._scribble = b"\x42" * engine.store.block_nbytes  # as floats they are far from all keys and values
        self._lease: dict[int, memoryview] = {}

    def _hear(self, report: Report) -> None:
        for new in report.tokens:
            assert new.token is not None
            self.outputs.setdefault(new.key[0], []).append(new.token.token_id)
            if new.finish_reason is not None:
                assert new.key[0] not in self.ends
                self.ends[new.key[0]] = new.finish_reason.value
        for key in report.removed:
            # By now nobody may write to its blocks.
            assert not self.blocks.owned_blocks(sequence_owner(key))
            self.ends.setdefault(key[0], "removed")
        self.failed += [key[0] for key in report.failed]

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        handed_over: bool = True,
        guide: GuideState | None = None,
    ) -> bool:
        """A request: with its prompt's K/V in place, or to be computed here. False if there is no room for what is in place."""
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, float(len(self.outputs)), guide=guide)
        if handed_over:
            given = self.blocks.allocate(sequence_owner(sequence.key), len(prompt) // self.blocks.block_size + 1)
            if given is None:
                return False
            sequence.block_table = given.block_ids
            (first,) = self.engine.step([StepRow(sequence, len(prompt))])
            assert first is not None
            sequence.num_computed_tokens = len(prompt)
            sequence.append(first, self.engine.card.max_model_len)
            self.outputs[name] = [first.token_id]
            if sequence.is_over:  # the service adds no such sequence
                self.ends[name] = str(sequence.finish_reason)
                self.blocks.release(sequence_owner(sequence.key))
                return True
        else:
            self.outputs[name] = []
        self.worker.handle(Add(sequence))
        return True

    def scribble(self, count: int) -> None:
        """A lease takes ``count`` free blocks, as a hand-off does at any time, and their bytes are another's from then on."""
        given = self.blocks.allocate(Owner(OwnerKind.LEASE, "scribbler"), count)
        if given is not None:
            self._lease = {block_id: self.engine.store.open_write(block_id) for block_id in given.block_ids}
            for view in self._lease.values():
                view[:] = self._scribble

    def let_go(self) -> None:
        """The lease's bytes are still its own; it ends."""
        for block_id, view in self._lease.items():
            assert bytes(view) == self._scribble
            self.engine.store.close_write(block_id)
        self.blocks.release(Owner(OwnerKind.LEASE, "scribbler"))
        self._lease = {}

    def step(self) -> None:
        """One turn of the model thread, with the books checked."""
        if self.worker.has_work():
            self.worker.step()
        self.scheduler.check_integrity()

    def run(self) -> None:
        """Until nothing is left; then every block is free or cached."""
        for _ in range(5000):
            if not self.worker.has_work():
                break
            self.step()
        assert not self.worker.has_work()
        self.let_go()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
