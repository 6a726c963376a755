"""Steps that are launched before the previous step's tokens are known: the output stays, and no block is freed too early."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import BeamSearch, SamplingParams, Watermark
from kvrelay.decode_worker.run_ahead import GoingOn, who_goes_on
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.model_worker import Add, Remove
from tests.decode_worker.rig import Rig, Watched, greedy
from tests.decode_worker.workload import add_all, assert_same
from tests.guides import ChainState, TokensState

VOCAB = 50
GREEDY = greedy(12)


def fake_rig(num_blocks: int = 64, *, runs_ahead: bool, **settings: int) -> Rig:
    return Rig(FakeEngine(fake_card(num_blocks=num_blocks, vocab_size=VOCAB), runs_ahead=runs_ahead), **settings)


@pytest.mark.parametrize("seed", range(60))
def test_the_output_is_that_of_an_engine_that_does_not_run_ahead(seed: int) -> None:
    draws = random.Random(seed)
    ahead = fake_rig(
        draws.choice((14, 20, 64)),
        runs_ahead=True,
        max_num_seqs=draws.choice((2, 4, 16)),
        max_batched_tokens=draws.choice((16, 24, 512)),
    )
    plain = fake_rig(256, runs_ahead=False)
    removed = add_all(ahead, plain, seed, draws, most_steps=4)
    while ahead.worker.has_work() and draws.random() < 0.95:
        ahead.step()
        ahead.let_go()
        ahead.scribble(draws.randint(0, 6) or 1)
    ahead.let_go()
    ahead.run()
    assert_same(ahead, plain, removed)
    assert set(ahead.ends) == set(plain.ends)


def test_steady_decoding_always_has_a_step_under_way() -> None:
    rig = fake_rig(runs_ahead=True)
    watched = rig.engine
    rig.add("a", [1, 2, 3], GREEDY)
    rig.add("b", [4, 5, 6, 7, 8], GREEDY)
    rig.step()
    rig.add("c", [9, 1], greedy(20))
    rig.run()
    # Only the first step has no other step under way; c joins while one is.
    assert watched.depths == [0] + [1] * (len(watched.depths) - 1)
    assert len(rig.outputs["c"]) == 20


def test_tokens_that_came_too_many_are_not_counted() -> None:
    rig = fake_rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], greedy(30, stop_token_ids=tuple(range(0, VOCAB, 2))))
    rig.run()
    assert rig.ends == {"a": "stop"}
    assert rig.count("sampled_tokens") == len(rig.outputs["a"]) - 1  # the first token came with the hand-off


def test_who_ended_keeps_its_blocks_until_the_step_that_writes_to_them_is_over() -> None:
    rig = fake_rig(runs_ahead=True)
    first, second = expected_output([1, 2, 3], 2, VOCAB)
    assert first != second
    rig.add("a", [1, 2, 3], greedy(30, stop_token_ids=(second,)))
    rig.step()
    assert rig.ends == {"a": "stop"}
    assert rig.blocks.ledger().num_running > 0
    assert rig.worker.has_work()
    rig.step()
    assert rig.blocks.ledger().num_running == 0
    assert rig.outputs["a"] == [first, second]
    rig.run()


def test_whose_kv_is_not_in_place_ends_alone_also_with_a_step_behind_it() -> None:
    rig = fake_rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], GREEDY)
    rig.add("b", [4, 5, 6], GREEDY)
    rig.add("c", [7, 8, 9], GREEDY)
    rig.step()
    rig.worker.handle(Remove(("c", 1)))
    rig.engine.store.open_write(0, 0)[:] = bytes(rig.engine.store.block_nbytes)
    rig.run(breaks=True)
    assert (rig.failed, rig.ends) == (["a"], {"c": "removed", "b": "length"})
    assert rig.outputs["b"] == expected_output([4, 5, 6], 12, VOCAB)


def test_who_is_removed_computes_no_more() -> None:
    rig = fake_rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], greedy(1000))
    rig.add("b", [4, 5, 6], greedy(9))
    rig.step()
    rig.worker.handle(Remove(("a", 1)))
    assert "a" not in rig.ends, "the step under way writes to its blocks"
    rig.step()
    assert rig.ends == {"a": "removed"}
    rig.run()
    assert rig.ends == {"a": "removed", "b": "length"}
    assert len(rig.outputs["b"]) == 9


def made(name: str, num_tokens: int = 5, **sampling: object) -> Sequence:
    params = greedy(**{"max_tokens": 9, **sampling})  # type: ignore[arg-type]
    sequence = Sequence(name, 1, list(range(num_tokens)), num_tokens - 1, params, 0.0)
    sequence.num_computed_tokens = num_tokens - 1
    sequence.block_tables = [[0, 1]]
    return sequence


def going_on(*sequences: Sequence) -> GoingOn:
    """These sequences generate in the step after one that samples a token of each."""
    return GoingOn([StepRow(one, 1, 1) for one in sequences], [])


def test_a_beam_search_waits_for_the_tokens_in_front() -> None:
    searching, free = made("searching", beam_search=BeamSearch(width=2)), made("free")
    flying = [StepRow(searching, 1), StepRow(free, 1)]
    assert who_goes_on(flying, [searching, free], [], 100) is None
    assert who_goes_on(flying[1:], [free], [searching], 100) is None
    assert who_goes_on(flying[1:], [free], [], 100) == going_on(free)


ON_THE_HOST: list[dict[str, object]] = [
    {"watermark": Watermark()},
    {"processors": ("mine",)},
    {"bad_words": ((3,), (1, 2))},
]


@pytest.mark.parametrize("params", [{}, *ON_THE_HOST])
def test_a_row_that_the_host_samples_defers_the_sampling_of_a_step_behind_another(params: dict[str, object]) -> None:
    asking, free = made("asking", **params), made("free")
    if not params:
        asking.guide = ChainState(9)
    asking.set_status(SequenceStatus.RUNNING)
    free.set_status(SequenceStatus.RUNNING)
    assert (asking.needs_host_to_sample, free.needs_host_to_sample) == (True, False)
    rows, ahead = [StepRow(asking, 1), StepRow(free, 1)], [StepRow(asking, 1, num_ahead=1), StepRow(free, 1, 1)]

    def is_deferred(behind: list[StepRow]) -> bool:
        leader = Leader(FakeEngine(fake_card(vocab_size=VOCAB), runs_ahead=True))
        front = leader.launch(rows)
        assert not front.is_deferred
        return leader.launch(behind, front).is_deferred

    assert not is_deferred(ahead[1:])
    assert is_deferred(ahead)
    # A sequence that joins knows all its tokens, but the host may have to sample its row later.
    assert is_deferred([rows[0], ahead[1]])


@pytest.mark.parametrize("params", [{}, *ON_THE_HOST])
def test_steady_decoding_of_a_row_that_the_host_samples_has_a_step_under_way(params: dict[str, object]) -> None:
    rig = fake_rig(runs_ahead=True)
    rig.add("a", [1, 2, 3], greedy(12))
    sampling = greedy(12, **params)
    rig.add("b", [4, 5, 6], sampling, guide=None if params else ChainState(20))
    rig.run()
    assert rig.engine.depths == [0] + [1] * 10
    assert [len(output) for output in rig.outputs.values()] == [12, 12]


def test_a_guide_is_not_asked_behind_its_end_nor_behind_a_stop_token() -> None:
    rig = fake_rig(runs_ahead=True)
    output = expected_output([4, 5, 6], 3, VOCAB)
    rig.add("ends", [1, 2, 3], greedy(30), guide=TokensState([7, 8, 9]))
    rig.add("stays", [4, 5, 6], greedy(30, watermark=Watermark()))
    rig.add("stops", [4, 5, 6], greedy(30, stop_token_ids=(output[2],)))
    rig.run()
    assert rig.ends == {"ends": "stop", "stays": "length", "stops": "stop"}
    assert rig.outputs["ends"] == [7, 8, 9]
    assert rig.outputs["stops"] == output
    # No step waited for the end of a sequence.
    assert rig.engine.depths == [0] + [1] * 28


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"bad_words": ((1,), (2,))},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"min_tokens": 5},
        {"typical_p": 0.5, "temperature": 1.0},
    ],
)
def test_what_the_device_or_the_position_tells_does_not_wait(params: dict[str, object]) -> None:
    asking = made("asking", **params)
    assert who_goes_on([StepRow(asking, 1)], [asking], [made("joining", **params)], 100) == going_on(asking)
    rig = fake_rig(runs_ahead=True)
    watched = rig.engine
    rig.add("a", [1, 2, 3], SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params}))  # type: ignore[arg-type]
    rig.run()
    assert watched.depths == [0] + [1] * 10


def test_a_step_waits_for_one_that_makes_room_for_somebody() -> None:
    stays, ends = made("stays"), made("ends", max_tokens=2)
    flying = [StepRow(stays, 1), StepRow(ends, 1)]
    assert who_goes_on(flying, [stays, ends], [], 100) == going_on(stays)
    assert who_goes_on(flying, [stays, ends], [], 100, awaits_room=True) is None
    assert who_goes_on(flying[:1], [stays], [], 100, awaits_room=True) == going_on(stays)
    # "ends" has ended with the step before: it holds its blocks until this step is over.
    assert who_goes_on(flying, [stays], [], 100, awaits_room=True) is None


def crowded(ends: SamplingParams) -> tuple[Rig, Watched]:
    """In a pool of 11 blocks two growing sequences hold 5. A prompt that needs 6 waits until one of them ends."""
    rig = fake_rig(11, runs_ahead=True)
    rig.add("stays", [1, 2, 3], greedy(13))
    rig.add("ends", list(range(15)), ends)
    rig.add("waits", list(range(1, 23)), greedy(2), handed_over=False)
    return rig, rig.engine


def test_who_waits_for_blocks_holds_nobody_up_and_gets_them_when_they_are_there() -> None:
    rig, watched = crowded(greedy(6))
    while "ends" not in rig.ends:
        rig.step()
        assert not rig.outputs["waits"]
    # Every step had a next one launched behind it, except the last: its end was known to free blocks.
    assert watched.depths == [0, 1, 1, 1, 1]
    rig.step()
    assert len(rig.outputs["waits"]) == 1
    rig.run()
    assert {name: len(output) for name, output in rig.outputs.items()} == {"stays": 13, "ends": 6, "waits": 2}
    assert rig.num_preemptions == 0


def test_who_waits_for_blocks_gets_those_of_a_sequence_that_stopped_one_step_later() -> None:
    stop = expected_output(list(range(15)), 4, VOCAB)[3]
    rig, watched = crowded(greedy(20, stop_token_ids=(stop,)))
    while "ends" not in rig.ends:
        rig.step()
    assert watched.depths == [0, 1, 1, 1]
    rig.step()  # the step that was launched before the stop token was known
    assert not rig.outputs["waits"]
    rig.step()
    assert len(rig.outputs["waits"]) == 1
    assert watched.depths == [0, 1, 1, 1, 0, 1]
    rig.run()
    assert len(rig.outputs["waits"]) == 2


def test_who_waits_for_blocks_gets_those_that_a_lease_lets_go() -> None:
    rig = fake_rig(11, runs_ahead=True)
    watched = rig.engine
    rig.scribble(4)
    rig.add("stays", [1, 2, 3], greedy(13))
    rig.add("waits", list(range(1, 23)), greedy(2), handed_over=False)
    for _ in range(3):
        rig.step()
    assert watched.depths == [0, 1, 1, 1]
    rig.let_go()
    rig.step()  # the step that is under way; no other is launched behind it
    assert watched.depths == [0, 1, 1, 1]
    rig.step()
    assert len(rig.outputs["waits"]) == 1
    rig.run()
    assert len(rig.outputs["waits"]) == 2


def test_a_search_that_waits_for_places_holds_nobody_up() -> None:
    rig = fake_rig(runs_ahead=True, max_num_seqs=3)
    watched = rig.engine
    rig.add("a", [1, 2, 3], greedy(4))
    rig.add("b", [4, 5, 6], greedy(9))
    search = greedy(3, beam_search=BeamSearch(width=2))
    chain = HashChain(b"model", rig.blocks.block_size)
    rig.worker.handle(Add(Sequence("search", 1, [7, 8], 2, search, 9.0, chain=chain)))
    for _ in range(3):
        rig.step()
    assert (rig.ends, watched.depths) == ({"a": "length"}, [0, 1, 1])
    assert [one.request_id for one in rig.scheduler.schedule(0.0).admitted] == ["search"]


def test_nobody_follows_a_last_token() -> None:
    last, full, free = made("last", max_tokens=2), made("full", num_tokens=9), made("free")
    flying = [StepRow(one, 1) for one in (last, full, free)]
    assert who_goes_on(flying, [last, full, free], [], 10) == going_on(free)


def test_a_prompt_goes_on_behind_its_chunk_and_generates_behind_its_last_one() -> None:
    chunk, rest, new = made("chunk"), made("rest"), made("new")
    for one in (chunk, rest, new):
        one.num_computed_tokens = 1
    flying = [StepRow(chunk, 2), StepRow(rest, 4)]
    found = who_goes_on(flying, [chunk, rest, new], [], 10)
    assert found == GoingOn([StepRow(rest, 1, 4)], [StepRow(chunk, 2, 2), StepRow(new, 4, 0)])
    assert (found.generating[0].is_fed, found.generating[0].samples) == (True, True)
    rows = [StepRow(chunk, 1, 2), StepRow(chunk, 2, 2), StepRow(new, 4)]
    assert [(row.is_fed, row.samples) for row in rows] == [(False, False), (False, True), (False, True)]


def test_log_probabilities_of_a_prompt_wait_for_those_before_them() -> None:
    chunk = made("chunk", num_prompt_logprobs=1)
    chunk.num_computed_tokens = 1
    assert who_goes_on([StepRow(chunk, 2)], [chunk], [], 10) is None
    assert who_goes_on([StepRow(chunk, 4)], [chunk], [], 10) is None
    chunk.num_computed_tokens = 4
    assert who_goes_on([StepRow(chunk, 1)], [chunk], [], 10) == going_on(chunk)


def test_chunks_of_prompts_run_ahead_beside_streams_and_alone() -> None:
    rig = fake_rig(256, runs_ahead=True, max_batched_tokens=64)
    watched, prompt = rig.engine, list(range(50)) * 8
    rig.add("stream", [1, 2, 3], greedy(200))
    rig.step()
    rig.local("prompt", prompt, greedy(6))
    rig.run()
    # The prompt begins between two steps, because its blocks might still be written to.
    assert watched.depths.count(0) == 2
    assert [row for row in watched.rows[3] if row[0] == "prompt"] == [("prompt", 32)]
    assert rig.outputs["prompt"] == expected_output(prompt, 6, VOCAB)
    assert rig.outputs["stream"] == expected_output([1, 2, 3], 200, VOCAB)
    watched.depths.clear()
    rig.local("alone", [7, *prompt], greedy(6))
    rig.run()
    assert watched.depths == [0] + [1] * (len(watched.depths) - 1)
    assert rig.outputs["alone"] == expected_output([7, *prompt], 6, VOCAB)


def test_prompts_that_wait_for_their_turn_hold_no_step_up() -> None:
    rig = fake_rig(512, runs_ahead=True, max_batched_tokens=64)
    watched = rig.engine
    prompts = [[number, *range(50)] * 6 for number in range(3)]
    for number, prompt in enumerate(prompts):
        rig.local(f"prompt{number}", prompt, greedy(4))
    rig.run()
    # Each prompt begins between two steps: only then is it known how much of a step the one before leaves.
    assert watched.depths.count(0) <= 6 < len(watched.depths) / 2
    assert [rig.outputs[f"prompt{number}"] for number in range(3)] == [
        expected_output(prompt, 4, VOCAB) for prompt in prompts
    ]


def test_a_prompt_whose_prefix_is_cached_meanwhile_is_looked_at_again() -> None:
    """A prompt waits for blocks. A lease publishes blocks of its prefix and keeps them. The prompt now fits and starts."""
    rig = fake_rig(16, runs_ahead=True)
    block_size = rig.blocks.block_size
    prompt = [index % VOCAB for index in range(10 * block_size - 2)]
    rig.add("stream", [4, 5, 6], greedy(40))
    lease = Owner(OwnerKind.LEASE, "of the same prefix")
    assert rig.blocks.allocate(lease, 9) is not None
    rig.add("waits", prompt, GREEDY, handed_over=False)
    for _ in range(3):
        rig.step()
    assert rig.engine.depths[-1] == 1, "who waits for blocks should hold nobody up"
    hashes = HashChain(rig.engine.card.layout.fingerprint(), block_size).hashes(prompt, 9)
    for index, block_hash in enumerate(hashes):
        rig.blocks.publish(lease, index, block_hash)
    waiting = [sequence for sequence in rig.scheduler.waiting if sequence.key[0] == "waits"]
    for _ in range(3):
        if rig.scheduler.waiting != waiting:
            break
        with suppress(AssertionError):  # the lease's blocks hold no K/V, so the admitted prompt's step fails
            rig.step()
    assert not rig.scheduler.waiting
