"""Prompts with images on a decode worker: checked at the hand-off, and never computed again where nobody reads images."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec
import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.images import fake_offset
from kvrelay.engine.fake.language import digests_by_start, expected_output, token_digests
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.messages import Failed, FailureCode, Preempted, Refuse, Role
from kvrelay.worker.model_worker import Report
from tests.decode_worker.rig import Rig, beams, greedy
from tests.decode_worker.service_rig import CARD, offer, submit
from tests.decode_worker.service_rig import Rig as ServiceRig
from tests.drafters import Oracle
from tests.images import png, reader, with_images

VOCAB = 50


def prompt_with(*shades: int) -> tuple[list[int], list[ImageSpan]]:
    """A prompt with an image for each shade; equal ones are equal images."""
    token_ids, images = with_images([11, 12, 13], *(part for shade in shades for part in (png(shade=shade), [14, 15])))
    return token_ids, [image.span for image in images]


# -- the service --------------------------------------------------------------------------------------------------


def test_a_request_with_images_is_not_prefilled_here() -> None:
    rig, (token_ids, images) = ServiceRig(), with_images([1, 2], png(128, 128))
    asked = msgspec.structs.replace(submit("a"), token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images)
    rig.ask(asked)
    [failed] = rig.failed()
    assert failed.code is FailureCode.INVALID
    assert failed.detail == f"the prompt has images: {CARD.no_images}"
    rig.assert_nothing_left()


def test_a_worker_that_decodes_and_reads_images_computes_them() -> None:
    token_ids, images = with_images([1, 2], png(128, 128), [5])
    asked = msgspec.structs.replace(submit("a"), token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images)
    rig = ServiceRig(reader())
    rig.ask(asked)
    rig.threads.run()
    rig.finish()
    assert rig.output("a") == expected_output(token_ids, 3, CARD.vocab_size, images=[one.span for one in images])
    assert rig.service.ports.images._read_nbytes == 0
    rig.assert_nothing_left()
    whole = ServiceRig(reader(takes_whole=True))
    whole.ask(asked)
    [failed] = whole.failed()
    assert failed.code is FailureCode.INVALID
    assert "computed whole" in failed.detail


def test_hashes_of_an_offer_are_those_of_its_images() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1)
    made = offer("a", token_ids, images=spans)
    for images in ([], [ImageSpan(spans[0].start, spans[0].stop, bytes(16))], prompt_with(1, 2)[1]):
        rig.ask(msgspec.structs.replace(made, images=images), "prefill", Role.PREFILL)
    refused = [message for _, message in rig.sent if isinstance(message, Refuse)]
    assert [one.code for one in refused] == [FailureCode.INTEGRITY, FailureCode.INTEGRITY, FailureCode.INVALID]
    rig.grant(made)


def test_the_offset_of_a_commit_is_the_sequences() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1, 2)
    made = offer("a", token_ids, images=spans)
    rig.verify(rig.grant(made), made, 5, position_offset=fake_offset(spans))
    [entry] = rig.service.entries.values()
    assert entry.sequence.position_offset == fake_offset(spans) != 0
    assert entry.sequence.spans == spans


@pytest.mark.parametrize(("shades", "position_offset"), [((), 1), ((1,), -11), ((1,), 4097)])
def test_an_impossible_offset_is_rejected(shades: Seq[int], position_offset: int) -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(*shades)
    rejected = rig.reject(offer("a", token_ids, images=spans), SampledToken(5), position_offset)
    assert rejected.code is FailureCode.INTEGRITY
    assert f"position_offset is {position_offset}" in rejected.detail


def test_a_request_that_lost_its_blocks_ends_so_that_its_gateway_goes_on_elsewhere() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1)
    made = offer("a", token_ids, images=spans)
    rig.verify(rig.grant(made), made, 5, position_offset=fake_offset(spans))
    rig.handle()
    [sequence] = rig.scheduler.waiting
    rig.scheduler._held.preempt(sequence, rig.scheduler.schedule(0.0))
    rig.service.on_report(Report(lost=rig.scheduler.take_lost()))
    [failed] = rig.told(Failed)
    assert isinstance(failed, Failed)
    assert (failed.code, rig.told(Preempted)) == (FailureCode.NO_ROOM, [])
    rig.assert_nothing_left()


# -- the scheduler ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(80))
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
