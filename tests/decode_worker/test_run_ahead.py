"""Steps launched before the tokens of the step before them are known: the same output, no block given away too early."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import root_hash
from kvrelay.common.sampling import BeamSearch, SamplingParams, Watermark
from kvrelay.decode_worker.model_worker import Add, DecodeModelWorker, Remove, Report
from kvrelay.decode_worker.run_ahead import samples_without_its_last_token, sequences_that_go_on
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.fake import FakeEngine, expected_output, fake_card
from kvrelay.engine.interface import LaunchedStep, StepRow
from kvrelay.engine.metrics import EngineMetrics
from kvrelay.engine.sequence import Sequence

BLOCK, VOCAB = 4, 50
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


class Rig:
    """A model worker without its thread, over a fake engine, and a lease that takes and scribbles over what is free."""

    def __init__(self, num_blocks: int = 64, *, runs_ahead: bool, **settings: int) -> None:
        card = fake_card(num_blocks=num_blocks, vocab_size=VOCAB)
        self.engine = FakeEngine(card, runs_ahead=runs_ahead)
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            DecodeSchedulerSettings(**settings), self.blocks, root_hash(card.layout.fingerprint()), card.max_model_len
        )
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.failed: list[str] = []
        self.metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.worker = DecodeModelWorker(self.engine, self.scheduler, self.metrics, self._hear)
        self.lease_blocks: list[int] = []

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

    def add(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, *, handed_over: bool = True) -> bool:
        """A request: with its prompt's K/V in place, or to be computed here. False if there is no room for what is in place."""
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, float(len(self.outputs)))
        if handed_over:
            given = self.blocks.allocate(sequence_owner(sequence.key), len(prompt) // BLOCK + 1)
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
            self.lease_blocks = given.block_ids
            for block_id in given.block_ids:
                self.engine.store.block(block_id)[:] = b"\xa5" * self.engine.store.block_nbytes

    def let_go(self) -> None:
        """The lease's bytes are still its own; it ends."""
        for block_id in self.lease_blocks:
            assert bytes(self.engine.store.block(block_id)) == b"\xa5" * self.engine.store.block_nbytes
        self.blocks.release(Owner(OwnerKind.LEASE, "scribbler"))
        self.lease_blocks = []

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


def workload(seed: int) -> list[tuple[str, list[int], SamplingParams, bool]]:
    """Requests of all kinds: (name, prompt, sampling, whether it was handed over)."""
    draws = random.Random(seed)
    made = []
    for index in range(draws.randint(3, 10)):
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 20),
            temperature=draws.choice((0.0, 1.0)),
            seed=draws.randrange(2**32),
            stop_token_ids=tuple(draws.sample(range(VOCAB), draws.choice((0, 2, 8)))),
            min_tokens=draws.choice((0, 0, 0, 4)),
            bad_words=((1, 2),) if draws.random() < 0.1 else (),
            num_logprobs=draws.choice((None, 2)),
        )
        prompt = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 17))]
        made.append((f"r{index}", prompt, sampling, draws.random() < 0.7))
    return made


@pytest.mark.parametrize("seed", range(60))
def test_the_output_is_that_of_an_engine_that_does_not_run_ahead(seed: int) -> None:
    draws = random.Random(seed)
    ahead = Rig(draws.choice((14, 20, 64)), runs_ahead=True, max_num_seqs=draws.choice((2, 4, 16)))
    plain = Rig(256, runs_ahead=False)
    removed = set()
    for name, prompt, sampling, handed_over in workload(seed):
        plain.add(name, prompt, sampling, handed_over=handed_over)
        while not ahead.add(name, prompt, sampling, handed_over=handed_over):
            ahead.let_go()
            ahead.step()
        for _ in range(draws.randint(0, 4)):
            ahead.step()
            if draws.random() < 0.5:
                ahead.let_go()
                ahead.scribble(draws.randint(1, 6))
        if draws.random() < 0.15:
            removed.add(name)
            ahead.worker.handle(Remove((name, 1)))
    plain.run()
    while ahead.worker.has_work() and draws.random() < 0.95:
        ahead.step()
        ahead.let_go()
        ahead.scribble(draws.randint(0, 6) or 1)
    ahead.let_go()
    ahead.run()
    for name, output in plain.outputs.items():
        found = ahead.outputs[name]
        if name in removed:
            assert found == output[: len(found)]
        else:
            assert (found, ahead.ends.get(name)) == (output, plain.ends.get(name)), name
    assert set(ahead.ends) == set(plain.ends)
    assert not ahead.failed


class Watched:
    """An engine that notes how many steps are under way when one is launched."""

    def __init__(self, engine: FakeEngine) -> None:
        self.depths: list[int] = []
        self.engine = engine
        self._launch: Callable[[Seq[StepRow], LaunchedStep | None], LaunchedStep] = engine.launch
        engine.launch = self._note  # type: ignore[method-assign]

    def _note(self, rows: Seq[StepRow], behind: LaunchedStep | None = None) -> LaunchedStep:
        self.depths.append(0 if behind is None else 1)
        return self._launch(rows, behind)


def test_steady_decoding_always_has_a_step_under_way() -> None:
    rig = Rig(runs_ahead=True)
    watched = Watched(rig.engine)
    rig.add("a", [1, 2, 3])
    rig.add("b", [4, 5, 6, 7, 8])
    rig.step()
    rig.add("c", [9, 1], replace_tokens(20))
    rig.run()
    # The first step has none before it; c joined while one was under way.
    assert watched.depths == [0] + [1] * (len(watched.depths) - 1)
    assert len(rig.outputs["c"]) == 20


def replace_tokens(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def test_tokens_that_came_too_many_are_not_counted() -> None:
    rig = Rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 2))))
    rig.run()
    assert rig.ends == {"a": "stop"}
    (sample,) = [one for one in rig.metrics.sampled_tokens.collect()[0].samples if one.name.endswith("_total")]
    assert sample.value == len(rig.outputs["a"]) - 1  # the first came with the hand-off


def test_who_ended_keeps_its_blocks_until_the_step_that_writes_to_them_is_over() -> None:
    rig = Rig(runs_ahead=True)
    first, second = expected_output([1, 2, 3], 2, VOCAB)
    assert first != second
    rig.add("a", [1, 2, 3], SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(second,)))
    rig.step()
    assert rig.ends == {"a": "stop"}
    assert rig.blocks.ledger().num_running > 0
    assert rig.worker.has_work()
    rig.step()
    assert rig.blocks.ledger().num_running == 0
    assert rig.outputs["a"] == [first, second]
    rig.run()


def test_a_step_that_fails_takes_those_that_run_ahead_of_it_down_too() -> None:
    rig = Rig(runs_ahead=True)
    rig.add("a", [1, 2, 3])
    rig.add("b", [4, 5, 6])
    rig.step()
    rig.worker.handle(Remove(("b", 1)))
    rig.engine.store.block(0)[:] = bytes(rig.engine.store.block_nbytes)  # whose K/V is not in place any more
    with pytest.raises(AssertionError) as failure:
        rig.step()
    assert isinstance(failure.value, Exception)
    rig.worker.on_step_failed(failure.value)
    assert sorted(rig.failed) == ["a", "b"]
    assert rig.ends["b"] == "removed"
    rig.run()


def test_who_is_removed_computes_no_more() -> None:
    rig = Rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], replace_tokens(1000))
    rig.add("b", [4, 5, 6], replace_tokens(9))
    rig.step()
    rig.worker.handle(Remove(("a", 1)))
    assert "a" not in rig.ends, "the step under way writes to its blocks"
    rig.step()
    assert rig.ends == {"a": "removed"}
    rig.run()
    assert rig.ends == {"a": "removed", "b": "length"}
    assert len(rig.outputs["b"]) == 9


def made(name: str, num_tokens: int = 5, **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    sequence = Sequence(name, 1, list(range(num_tokens)), num_tokens - 1, params, 0.0)
    sequence.num_computed_tokens = num_tokens - 1
    sequence.block_table = [0, 1]
    return sequence


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"watermark": Watermark()},
        {"beam_search": BeamSearch(width=2)},
        {"processors": ("mine",)},
        {"bad_words": ((1, 2),)},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"min_tokens": 2},
    ],
)
def test_what_depends_on_the_last_token_waits_for_it(params: dict[str, object]) -> None:
    asking, free = made("asking", **params), made("free")
    assert not samples_without_its_last_token(asking)
    assert samples_without_its_last_token(free)
    flying = [StepRow(asking, 1), StepRow(free, 1)]
    assert sequences_that_go_on(flying, [asking, free], [], 100) is None
    assert sequences_that_go_on(flying[1:], [free], [asking], 100) is None
    assert sequences_that_go_on(flying[1:], [free], [], 100) == [free]


def test_nobody_follows_a_last_token_and_prompts_wait() -> None:
    last, full, free = made("last", max_tokens=2), made("full", num_tokens=9), made("free")
    flying = [StepRow(one, 1) for one in (last, full, free)]
    assert sequences_that_go_on(flying, [last, full, free], [], 10) == [free]
    prompt = made("prompt")
    prompt.block_table = []
    assert sequences_that_go_on(flying, [last, full, free], [prompt], 10) is None
    chunk = made("chunk")
    chunk.num_computed_tokens = 1
    assert sequences_that_go_on([StepRow(chunk, 2)], [chunk], [], 10) is None


def test_a_row_ahead_that_no_step_feeds_is_found() -> None:
    engine = FakeEngine(fake_card(vocab_size=VOCAB), runs_ahead=True)
    row = StepRow(made("a"), 1, num_ahead=1)
    with pytest.raises(AssertionError, match="no step before it sampled"):
        engine.launch([row]).wait()
    with pytest.raises(AssertionError, match="no step before it sampled"):
        engine.launch([replace(row)], behind=engine.launch([])).wait()
