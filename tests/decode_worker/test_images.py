"""Sequences with images that lose their blocks on a decode worker: they end, or are computed again where images are read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.language import digests_by_start, expected_output, token_digests
from kvrelay.engine.kv.owners import Owner, OwnerKind
from tests.decode_worker.rig import Rig, beams, greedy
from tests.drafters import Oracle
from tests.images import png, with_images

VOCAB = 50


def prompt_with(*shades: int) -> tuple[list[int], list[ImageSpan]]:
    """A prompt with an image for each shade; equal ones are equal images."""
    token_ids, images = with_images([11, 12, 13], *(part for shade in shades for part in (png(shade=shade), [14, 15])))
    return token_ids, [image.span for image in images]


def test_a_sequence_with_images_that_gives_way_ends() -> None:
    rig, (token_ids, spans) = Rig(num_blocks=10), prompt_with(1)
    rig.add("first", list(range(10)), greedy(28))
    rig.add("imaged", token_ids, greedy(12), spans=spans)
    rig.run()
    assert rig.lost == ["imaged"]
    assert (rig.names, rig.failed, rig.ends) == ([], [], {"first": "length"})
    assert rig.num_preemptions == 1
    assert rig.outputs["imaged"] == expected_output(token_ids, len(rig.outputs["imaged"]), 1000, images=spans)


def test_a_beam_search_with_images_ends_as_a_whole() -> None:
    rig, (token_ids, spans) = Rig(num_blocks=12), prompt_with(1)
    rig.add("first", list(range(10)), greedy(36))
    rig.add("imaged", token_ids, beams(3, stops=()), spans=spans)
    rig.run()
    assert rig.lost == ["imaged"]
    assert rig.names == []


def test_a_beam_search_with_images_finds_its_beams() -> None:
    rig, (token_ids, spans) = Rig(), prompt_with(1)
    rig.add("imaged", token_ids, beams(3), spans=spans)
    rig.run()
    assert len(rig.beams["imaged"]) == 3


@dataclass
class Imaged:
    """A request of the random workload, and what its attempts gave."""

    prompt: list[int]
    spans: list[ImageSpan]
    sampling: SamplingParams
    is_local: bool
    output: list[int] = field(default_factory=list)
    attempt: str = ""  # the name of the last one


def imaged_workload(draws: random.Random) -> dict[str, Imaged]:
    """Random requests, some with the same images and the same text."""
    made = {}
    for index in range(draws.randint(4, 9)):
        shades = [draws.randrange(3) for _ in range(draws.choice((0, 1, 1, 2)))]
        prompt, spans = prompt_with(*shades)
        prompt += [20] * draws.randrange(6)
        sampling = greedy(draws.randint(2, 40), temperature=draws.choice((0.0, 1.0)), seed=draws.randrange(99))
        if draws.random() < 0.2:
            sampling = beams(draws.randint(2, 3), max_tokens=8)
        made[f"r{index}"] = Imaged(prompt, spans, sampling, is_local=not spans and draws.random() < 0.5)
    return made


class Breaking:
    """Breaks steps at random."""

    def __init__(self, draws: random.Random, chance: float) -> None:
        self._draws, self._chance = draws, chance

    def __call__(self, shares: object) -> None:
        if self._draws.random() < self._chance:
            raise RuntimeError("this step fails")


@pytest.mark.parametrize("seed", range(40))
def test_lost_sequences_compute_no_more_and_go_on_elsewhere_as_if_nothing_had_happened(seed: int) -> None:
    """Each lost request comes back by a hand-off with its output so far, as its gateway would send it."""
    draws = random.Random(seed)
    wishes, plain = imaged_workload(draws), Rig(num_blocks=256)
    windows = draws.choice(((None,), (None,), (None, 8)))
    breaking = Breaking(draws, draws.choice((0.0, 0.0, 0.05)))
    breaks = breaking._chance > 0
    card = fake_card(num_blocks=draws.randint(16, 24), windows=windows)
    engine = FakeEngine(card, breaking, runs_ahead=draws.random() < 0.5)
    rig = Rig(engine, max_num_seqs=draws.choice((3, 8)))
    for name, wish in wishes.items():
        plain.add(name, wish.prompt, wish.sampling, spans=wish.spans, handed_over=not wish.is_local)
    plain.run()
    todo, num_added, over = list(wishes), 0, set[str]()

    def step() -> None:
        rows = rig.step(breaks=breaks)
        assert not over & {name for name, _ in rows}, "a sequence that was lost computes"
        for name in [one for one in (*rig.lost, *rig.failed) if one not in over]:
            over.add(name)
            assert name not in rig.names
            asked = name.partition(".")[0]
            if wishes[asked].sampling.beam_search is None:
                wishes[asked].output += rig.outputs[name]
            todo.append(asked)

    for _ in range(3000):
        if todo:
            asked = todo[0]
            wish, name = wishes[asked], f"{asked}.{num_added}"
            chance = breaking._chance
            breaking._chance = 0.0  # while the prefill worker computes
            if rig.add(
                name, wish.prompt, wish.sampling, handed_over=not wish.is_local, spans=wish.spans, output=wish.output
            ):
                todo.pop(0)
                num_added, wish.attempt = num_added + 1, name
            breaking._chance = chance
        for _ in range(draws.randint(1, 3)):
            step()
        rig.let_go()
        if draws.random() < 0.3 and todo:
            rig.scribble(draws.randint(1, 3))
        if not todo and not rig.worker.has_work():
            break
    rig.run()
    assert not todo
    assert all(wishes[name.partition(".")[0]].spans for name in rig.lost), "only images cannot be computed again"
    for asked, wish in wishes.items():
        if wish.sampling.beam_search is not None:
            assert rig.beams[wish.attempt] == plain.beams[asked]
        else:
            assert wish.output + rig.outputs[wish.attempt] == plain.outputs[asked]
            assert_cached_rightly(rig, engine, wish, plain.outputs[asked])


def assert_cached_rightly(rig: Rig, engine: FakeEngine, wish: Imaged, output: list[int]) -> None:
    """Compare all bytes of the blocks that the prefix cache has for a request with those that it must have."""
    size, token_ids = rig.blocks.block_size, [*wish.prompt, *output]
    chain = HashChain(engine.card.layout.fingerprint(), size, images=wish.spans)
    hashes = chain.hashes(token_ids, len(token_ids) // size)
    num_cached = rig.blocks.num_cached_prefix(hashes)
    if not num_cached:
        return
    owner = Owner(OwnerKind.LEASE, "reader")
    given = rig.blocks.allocate(owner, num_cached, hashes[:num_cached], is_whole=False)
    assert given is not None
    digests = token_digests(token_ids, images=digests_by_start(wish.spans))
    nbytes = engine.card.layout.geometry.groups[0].token_nbytes
    for index, block_id in enumerate(given.block_tables[0][: given.num_cached]):
        expected = b"".join((digest * nbytes)[:nbytes] for digest in digests[index * size : (index + 1) * size])
        assert bytes(engine.store.block(block_id)) == expected, f"block {index} of {wish}"
    rig.blocks.release(owner)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_drafts_do_not_change_the_output_behind_images(runs_ahead: bool) -> None:
    token_ids, spans = prompt_with(1, 1)
    output = expected_output(token_ids, 40, 1000, images=spans)
    rig = Rig(FakeEngine(fake_card(), runs_ahead=runs_ahead), drafter=Oracle({"imaged": output}))
    rig.add("imaged", token_ids, greedy(40), spans=spans)
    rig.run()
    assert rig.outputs["imaged"] == output
    assert rig.drafted() > 0


@pytest.mark.parametrize("seed", range(40))
def test_images_that_are_read_here_are_computed_again_by_whoever_lost_their_blocks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random prompts with images, whole or not, over few blocks: outputs and cached blocks are those of undisturbed runs."""
    draws = random.Random(seed)
    wishes, takes_whole = imaged_workload(draws), draws.random() < 0.6
    card = fake_card(num_blocks=draws.randint(16, 24), windows=draws.choice(((None,), (None,), (None, 8))))
    breaking = Breaking(draws, draws.choice((0.0, 0.0, 0.05)))
    engine = FakeEngine(
        card, breaking, runs_ahead=draws.random() < 0.5, has_whole_images=takes_whole, reads_back_once=False
    )
    most = draws.choice((16, 24, 512))
    rig = Rig(
        engine,
        max_num_seqs=draws.choice((3, 8)),
        max_batched_tokens=most,
        pace=FakePace(0.01, draws.choice((0.0, 0.001, 0.01))) if draws.random() < 0.7 else None,
    )
    on_failed = rig.worker.on_step_failed

    def on_step_failed(error: Exception) -> None:
        assert isinstance(error, RuntimeError), error  # no step is one that the engine refuses
        on_failed(error)

    monkeypatch.setattr(rig.worker, "on_step_failed", on_step_failed)
    plain = Rig(num_blocks=256)
    for name, wish in wishes.items():
        plain.add(name, wish.prompt, wish.sampling, spans=wish.spans)
    plain.run()
    todo = list(wishes)
    for _ in range(3000):
        if todo and draws.random() < 0.5:
            wish = wishes[name := todo.pop(0)]
            rig.add(
                name,
                wish.prompt,
                wish.sampling,
                handed_over=False,
                spans=wish.spans,
                reads_images=True,
                has_whole_images=takes_whole,
            )
        rows = rig.step(breaks=breaking._chance > 0)
        assert sum(num_tokens for _, num_tokens in rows) <= 2 * most  # up to two steps
        rig.let_go()
        if draws.random() < 0.3:
            rig.scribble(draws.randint(1, 3))
        if not todo and not rig.worker.has_work():
            break
    rig.run(breaks=breaking._chance > 0)
    assert rig.lost == []
    for name, wish in wishes.items():
        if name in rig.failed:
            continue
        if wish.sampling.beam_search is not None:
            assert rig.beams[name] == plain.beams[name]
        else:
            assert rig.outputs[name] == plain.outputs[name]
            assert_cached_rightly(rig, engine, wish, plain.outputs[name])
