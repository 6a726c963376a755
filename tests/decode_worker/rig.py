"""The decode worker's model worker without its thread. Its reports and the ownership of blocks are checked at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageSpan
from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import BeamSearch, SampledToken, SamplingParams
from kvrelay.decode_worker.drafter import Drafter
from kvrelay.decode_worker.drafts import Drafts
from kvrelay.decode_worker.forced import GuideDrafter
from kvrelay.decode_worker.head import HeadDrafter
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.beams.search import FinishedBeam, Search, advance
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.images import fake_offset
from kvrelay.engine.fake.language import candidates, token_digests
from kvrelay.engine.fake.step import FakeSlots
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.leased_blocks import lease_owner
from kvrelay.engine.kv.owners import Owner, OwnerKind, sequence_owner
from kvrelay.engine.step.interface import BlockStore, DraftHead, Engine, LaunchedStep, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.plan import PlanRow, RowResult, SamplingInputs, StepPlan
from kvrelay.engine.step.sequence import GuideState, Sequence
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Add, ModelWorker, Report


def beams(
    width: int, max_tokens: int = 12, stops: tuple[int, ...] = (7,), **search: float | bool | None
) -> SamplingParams:
    """A beam search that returns all its beams."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        stop_token_ids=stops,
        beam_search=BeamSearch(width=width, num_return=width, **search),  # type: ignore[arg-type]
    )


def greedy(max_tokens: int = 12, **sampling: object) -> SamplingParams:
    """Ordinary greedy sampling."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})  # type: ignore[arg-type]


def token_lists(found: Seq[FinishedBeam]) -> list[list[int]]:
    """The tokens of each beam."""
    return [[token.token_id for token in beam.tokens] for beam in found]


def expected_beams(prompt: Seq[int], sampling: SamplingParams, vocab_size: int) -> list[list[int]]:
    """The beams that a fake engine must find: those of the search alone, without blocks, batches and a scheduler."""
    search = Search()
    while not search.is_over:
        told = []
        for beam in search.live:
            digest = token_digests([*prompt, *(token.token_id for token in beam.tokens)])[-1]
            told.append(SampledToken(0, top_logprobs=candidates(sampling, digest, vocab_size)))
        search = advance(search, told, sampling, sampling.max_tokens)
    return token_lists(search.finished)


class WatchedStep:
    """Implements LaunchedStep."""

    def __init__(self, step: LaunchedStep, on_wait: Callable[[], None]) -> None:
        self._step = step
        self._on_wait = on_wait

    @property
    def is_deferred(self) -> bool:
        return self._step.is_deferred

    def sample(self, inputs: SamplingInputs) -> None:
        self._step.sample(inputs)

    def wait(self) -> list[RowResult]:
        self._on_wait()
        return self._step.wait()


class Watched:
    """An engine that notes each launched step, and how many steps are under way at that time. Implements Engine."""

    def __init__(self, engine: Engine, on_launch: Callable[[Seq[PlanRow]], None]) -> None:
        self.depths: list[int] = []
        self.rows: list[list[tuple[str, int]]] = []  # (name, tokens) of each step
        self.num_copies = 0
        self._engine = engine
        self._on_launch = on_launch
        self._names: dict[int, str] = {}  # by slot
        self._num_under_way = 0

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    @property
    def store(self) -> BlockStore:
        return self._engine.store

    @property
    def runs_ahead(self) -> bool:
        return self._engine.runs_ahead

    @property
    def num_stages(self) -> int:
        return self._engine.num_stages

    @property
    def num_slots(self) -> int:
        return self._engine.num_slots

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        self.num_copies += len(pairs)
        self._engine.copy_blocks(pairs)

    def check_device(self) -> None:
        self._engine.check_device()

    def not_live(self) -> list[str]:
        return self._engine.not_live()

    def close(self) -> None:
        self._engine.close()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for join in plan.joins:
            self._names[join.slot] = join.name.partition("/")[0]
        self._on_launch(plan.rows)
        self.depths.append(self._num_under_way)
        self.rows.append([(self._names[row.slot], row.num_tokens) for row in plan.rows])
        step = self._engine.launch(plan)
        self._num_under_way += 1
        return WatchedStep(step, self._on_wait)

    def _on_wait(self) -> None:
        self._num_under_way -= 1


def beside(engine: Engine) -> Engine:
    """Another engine with the same model and the same blocks."""
    other: Any = copy.copy(engine)
    if isinstance(engine, FakeEngine):
        other._slots, other._launched = FakeSlots(len(engine.card.layout.geometry.groups)), None
    else:
        other._slots, other._sampled_tokens = copy.deepcopy(other._slots), other._sampled_tokens.clone()
        other._head = None
    return cast("Engine", other)


class Rig:
    """A model worker over an engine, and a lease that takes free blocks and overwrites them."""

    def __init__(
        self,
        engine: Engine | None = None,
        num_blocks: int | None = None,
        *,
        pace: FakePace | None = None,
        windows: tuple[int | None, ...] = (None,),
        drafter: Drafter | None = None,
        head: DraftHead | None = None,
        **settings: int | float,
    ) -> None:
        """``num_blocks``: size of the pool, by default the engine's. Without ``engine`` there is a fake one.

        ``pace``: how long steps take. ``windows``: those of a fake engine's groups of layers.

        ``drafter``: drafts tokens, in addition to those that guides force.

        ``head``: the engine's head, which drafts instead of ``drafter``.
        """
        card = fake_card(num_blocks=num_blocks or 64, windows=windows)
        engine = engine or FakeEngine(card, reads_back_once=pace is not None)
        self.now_s = 0.0
        self._pace = pace
        card = engine.card
        self.engine = Watched(engine, self._on_launch)
        self._prefill: Leader | None = None
        self._own = engine
        windows, num_blocks = card.layout.geometry.windows, num_blocks or card.num_blocks
        of_scheduler = DecodeSchedulerSettings(**settings)  # type: ignore[arg-type]
        self.blocks = BlockManager(
            num_blocks * len(windows),
            card.layout.block_size,
            lambda: 0.0,
            windows=windows,
            max_step_tokens=of_scheduler.max_batched_tokens or 512,
            has_states=card.layout.geometry.has_states,
        )
        self._fingerprint = card.layout.fingerprint()
        max_model_len = min(card.max_model_len, num_blocks * card.layout.block_size)
        self.registry = CollectorRegistry()
        drafts, leader = None, Leader(self.engine)
        if head is not None:
            drafter = HeadDrafter("head", head, leader.slot_of, lambda: 0.0, DraftMetrics(CollectorRegistry()))
        if drafter is not None:
            drafts = Drafts([GuideDrafter(), drafter], of_scheduler.speculation_tokens, DraftMetrics(self.registry))
        self.scheduler = DecodeScheduler(of_scheduler, self.blocks, max_model_len, "cpu", drafts, engine.num_stages)
        self.outputs: dict[str, list[int]] = {}
        self.sampled: dict[str, list[SampledToken]] = {}  # tokens sampled here, with their log probabilities
        self.beams: dict[str, tuple[FinishedBeam, ...]] = {}  # of searches that have ended
        self.begun: list[str] = []  # searches that have begun
        self.ends: dict[str, str] = {}
        self.failed: list[str] = []
        self.lost: list[str] = []  # ended because they lost their blocks
        self.prompt_logprobs: dict[str, list[SampledToken]] = {}
        self.most_running = 0
        metrics = EngineMetrics(self.registry, self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.worker = ModelWorker(leader, self.scheduler, metrics, self._hear, lambda: self.now_s)
        self._scribble = b"\x42" * engine.store.block_nbytes  # as floats, unlike any key or value
        self._lease: dict[int, memoryview] = {}
        self._num_added = 0

    @property
    def names(self) -> list[str]:
        """The requests that wait or run."""
        return [one.request_id for one in self.scheduler.waiting + self.scheduler.running]

    def count(self, metric: str) -> float:
        """A counter's value."""
        return self.registry.get_sample_value(f"kvrelay_{metric}_total") or 0.0

    def drafted(self, metric: str = "draft") -> float:
        """The number of drafted tokens, or of accepted ones with "accepted_draft"."""
        name = f"kvrelay_{metric}_tokens_total"
        return sum(
            sample.value for family in self.registry.collect() for sample in family.samples if sample.name == name
        )

    def drafted_by(self, drafter: str) -> float:
        """The number of tokens that one drafter drafted."""
        return self.registry.get_sample_value("kvrelay_draft_tokens_total", {"drafter": drafter}) or 0.0

    @property
    def num_preemptions(self) -> float:
        return self.count("preemptions")

    def _on_launch(self, rows: Seq[PlanRow]) -> None:
        if self._pace is not None:
            self.now_s += self._pace.of(rows)
        self.scheduler.check_integrity()
        self.most_running = max(self.most_running, len(self.scheduler.running))

    def _hear(self, report: Report) -> None:
        for new in report.progress:
            name = new.key[0]
            if new.token is not None:
                self.outputs.setdefault(name, []).append(new.token.token_id)
                self.sampled.setdefault(name, []).append(new.token)
            elif new.beams:
                self.beams[name] = new.beams
            else:
                self.begun.append(name)
            if new.prompt_logprobs is not None:
                self.prompt_logprobs.setdefault(name, new.prompt_logprobs)
            if new.finish_reason is not None:
                assert name not in self.ends
                self.ends[name] = new.finish_reason.value
        for key in report.removed:
            # No step may write to its blocks any more.
            assert not self.blocks.owned_blocks(sequence_owner(key))
            self.ends.setdefault(key[0], "removed")
        self.failed += [key[0] for key in report.failed]
        self.lost += [key[0] for key in report.lost]
        for key in (*report.failed, *report.lost):
            assert not self.blocks.owned_blocks(sequence_owner(key))

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        handed_over: bool = True,
        guide: GuideState | None = None,
        priority: int = 0,
        key: str = "",
        spans: Seq[ImageSpan] = (),
        output: Seq[int] = (),
        reads_images: bool = False,
        has_whole_images: bool = False,
        images: ReadImages | None = None,
    ) -> bool:
        """Add a request, with its prompt's K/V in place if ``handed_over``. Returns False if there are no blocks for that K/V.

        ``spans``: of images, which only another worker can read, unless ``reads_images``. ``output``: of an earlier attempt.
        ``images``: those of a prompt that is computed here, read for an engine that encodes them.
        """
        self._num_added += 1
        self.ends.pop(name, None)  # the end of an earlier request with this name
        arrival_s, chain = float(self._num_added), HashChain(self._fingerprint, self.blocks.block_size, images=spans)
        tokens = [*prompt, *output]
        sequence = Sequence(name, 1, tokens, len(prompt), sampling, arrival_s, guide=guide, chain=chain)
        sequence.flow, sequence.spans, sequence.position_offset = Flow(key, priority), spans, fake_offset(spans)
        sequence.has_whole_images = has_whole_images
        if reads_images and spans and not handed_over:
            sequence.images = ReadImages(tuple(spans), ())
        if images is not None:
            sequence.images, sequence.position_offset = images, images.position_offset
        first = None
        if handed_over:
            lease = lease_owner(name)
            # All blocks of windowed groups are needed, because the prompt is computed in this pool.
            num_blocks, spare = len(tokens) // self.blocks.block_size + 1, self.blocks.num_promised
            given = self.blocks.allocate(lease, num_blocks, spare=spare, is_whole=True)
            if given is None:
                return False
            first = self._compute(sequence, lease, given.block_tables)
            if sequence.is_over:  # the service does not add a sequence that is over
                self.outputs[name], self.ends[name] = [first.token_id], str(sequence.finish_reason)
                self.blocks.release(sequence_owner(sequence.key))
                return True
        if sampling.beam_search is None:
            self.outputs[name] = [] if first is None else [first.token_id]
            first = None
        self.worker.handle(Add(sequence, first))
        return True

    def local(self, name: str, prompt: list[int], sampling: SamplingParams, key: str = "") -> None:
        """Add a request whose prompt is computed here."""
        self.add(name, prompt, sampling, handed_over=False, key=key)

    def _compute(self, sequence: Sequence, lease: Owner, block_tables: list[list[int]]) -> SampledToken:
        """Compute and publish a prompt's blocks, as a prefill worker and a hand-off do. Returns the first token."""
        sequence.block_tables = block_tables
        if self._prefill is None:
            self._prefill = Leader(beside(self._own))
        sequence.images = ReadImages(tuple(sequence.spans), ()) if sequence.spans else None
        (result,) = self._prefill.step([StepRow(sequence, sequence.num_tokens)])
        sequence.images = None  # as on a worker that got the prompt by hand-off
        (first,) = result.tokens
        sequence.num_computed_tokens = sequence.num_tokens
        for index, block_hash in enumerate(sequence.block_hashes(sequence.num_tokens // self.blocks.block_size)):
            self.blocks.publish(lease, index, block_hash)
        self.blocks.hand_on(lease, sequence_owner(sequence.key))
        if sequence.sampling.beam_search is None:
            assert not any(self.blocks.slide(sequence_owner(sequence.key), sequence.num_tokens))
        if sequence.sampling.beam_search is None:
            sequence.append(first, self.engine.card.max_model_len)
        return first

    def scribble(self, count: int) -> None:
        """A lease takes ``count`` free blocks, as a hand-off may at any time, and overwrites their bytes."""
        given = self.blocks.allocate(Owner(OwnerKind.LEASE, "scribbler"), count)
        if given is not None:
            taken = [block_id for table in given.block_tables for block_id in table]
            self._lease = {block_id: self.engine.store.open_write(block_id, 0) for block_id in taken}
            for view in self._lease.values():
                view[:] = self._scribble

    def let_go(self) -> None:
        """Check that nothing overwrote the lease's bytes, and end it."""
        for block_id, view in self._lease.items():
            assert bytes(view) == self._scribble
            self.engine.store.close_write(block_id)
        self.blocks.release(Owner(OwnerKind.LEASE, "scribbler"))
        self._lease = {}

    def step(self, *, breaks: bool = False) -> list[tuple[str, int]]:
        """Run one turn of the model worker. Returns (name, tokens) of the rows that it launched. With ``breaks`` it may fail."""
        num_before = len(self.engine.rows)
        if self.worker.has_work():
            try:
                self.worker.step()
            except Exception as error:
                if not breaks:
                    raise
                self.worker.on_step_failed(error)
        self.scheduler.check_integrity()
        return [row for rows in self.engine.rows[num_before:] for row in rows]

    def run(self, *, breaks: bool = False) -> dict[str, list[int] | list[list[int]]]:
        """Run until no work is left, and check that every block is free or cached. Returns all outputs, as tokens or beams."""
        for _ in range(5000):
            if not self.worker.has_work():
                break
            self.step(breaks=breaks)
        assert not self.worker.has_work()
        self.let_go()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
        return {**self.outputs, **{name: token_lists(found) for name, found in self.beams.items()}}
