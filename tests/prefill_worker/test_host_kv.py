"""Prompts on a prefill worker with a tier below its pool: what the tier has is not computed, and no other prompt waits for it.

The fake engine reads back every position before it samples, so a token shows that all bytes were right.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections import Counter

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.host.tier import HostTier
from kvrelay.engine.kv.owners import OwnerKind, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.model_worker import Add, Remove, Report, TakeBack
from tests.host_tier import has_copied_out
from tests.images import png, reader, with_images
from tests.prefill_worker.rig import ModelRig

BLOCK = 4
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


class Rig(ModelRig):
    """A model worker with a tier. The test lets it ``copy``."""

    def __init__(
        self,
        num_blocks: int = 16,
        num_kept: int = 400,
        windows: tuple[int | None, ...] = (None,),
        num_stages: int = 1,
        **settings: int,
    ) -> None:
        self.engine = FakeEngine(
            fake_card(num_blocks=num_blocks, block_size=BLOCK, windows=windows),
            num_stages=num_stages,
            has_whole_images=True,
        )
        self.told: Counter[str] = Counter()
        self.returned = threading.Event()
        super().__init__(self.engine, tier_of=lambda blocks: self._tier(blocks, num_kept), **settings)

    def _tier(self, blocks: BlockManager, num_kept: int) -> HostTier:
        store = self.engine.store
        memory = memoryview(mmap.mmap(-1, num_kept * store.block_nbytes))
        geometry = self.engine.card.layout.geometry
        self.tier = HostTier(store, blocks, geometry, memory, tell=self._count, on_returned=self.returned.set)
        return self.tier

    def _hear(self, report: Report) -> None:
        super()._hear(report)
        for key in report.removed:
            self.blocks.release(sequence_owner(key))

    def _count(self, event: str, number: int) -> None:
        self.told[event] += number

    def imaged(self, name: str, *parts: list[int] | bytes) -> int:
        """Add a prompt with images whose tokens see each other. Returns its token."""
        prompt, images = with_images(*parts)
        spans = tuple(image.span for image in images)
        chain = HashChain(self._fingerprint, BLOCK, images=spans)
        sequence = Sequence(name, 1, prompt, len(prompt), ONE_TOKEN, 0.0, chain=chain, spans=spans)
        sequence.images, sequence.has_whole_images = reader(takes_whole=True).read(prompt, len(prompt), images), True
        sequence.position_offset = sequence.images.position_offset
        self.worker.handle(Add(sequence))
        return expected_output(prompt, 1, self.engine.card.vocab_size, images=spans)[0]

    def copy(self) -> None:
        while self.tier.work():
            pass

    def prompt(self, name: str, prompt: list[int]) -> None:
        self.local(name, prompt, ONE_TOKEN)

    def compute(self, name: str, prompt: list[int]) -> None:
        """Compute one prompt to its end, with copies in both directions."""
        self.prompt(name, prompt)
        self.run_with_copies()
        self.right(name, prompt)

    def run_with_copies(self) -> None:
        while self.worker.has_work():
            is_changed = self.worker.step()
            self.scheduler.check_integrity()
            assert self.tier.work() or is_changed, "all wait, and nothing comes"
        self.copy()
        self.run()

    def run_until_done(self) -> None:
        """The same beside the tier's thread."""
        while self.worker.has_work():
            self.returned.clear()
            if not self.worker.step():
                assert self.returned.wait(30), "all wait, and nothing comes"
            self.scheduler.check_integrity()

    def wait_for_copies(self) -> None:
        """Wait until the tier's thread has copied out what is published."""
        while not has_copied_out(self.tier):
            time.sleep(0.001)  # polls for a state

    def right(self, name: str, prompt: list[int]) -> None:
        assert self.tokens[name] == expected_output(prompt, 1, self.engine.card.vocab_size)[0]

    def cached(self, name: str) -> int:
        """The tokens of a prompt that it did not compute."""
        (found,) = {one.num_cached_tokens for report in self.reports for one in report.progress if one.key[0] == name}
        return found

    @property
    def returning(self) -> int:
        """Blocks that fetches have, those included that the pool had."""
        return sum(count for owner, count in self.blocks.owners().items() if owner.kind is OwnerKind.RETURN)

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.tier.check_integrity()
        assert not self.scheduler._fetches._asked
        assert self.returning == 0


def text(number: int, num_tokens: int) -> list[int]:
    return [(7 * number + 13 * position) % 997 for position in range(num_tokens)]


def test_a_prompt_computes_only_what_neither_pool_nor_tier_has() -> None:
    rig = Rig()
    first = text(1, 41)
    rig.compute("first", first)
    rig.compute("other", text(2, 64))
    rig.compute("again", [*first[:40], 5, 6, 7])
    assert rig.cached("again") == 40
    assert rig.told["tokens"] == 40
    rig.check()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_blocks_that_come_back_may_end_inside_an_image(windows: tuple[int | None, ...]) -> None:
    """The rest of the image is computed in one step, although that takes more than a step's other prompts leave."""
    rig = Rig(windows=windows, max_batched_tokens=16)
    image = png(128, 128)
    token = rig.imaged("first", text(1, 6), image, text(2, 9))
    rig.run_with_copies()
    assert rig.tokens["first"] == token
    rig.compute("other", text(3, 64))
    long = text(4, 30)
    rig.prompt("long", long)
    token = rig.imaged("again", text(1, 6), image, text(5, 9))  # differs behind the image's last token, in its block
    rig.run_with_copies()
    assert rig.tokens["again"] == token
    assert rig.cached("again") == 8
    rig.right("long", long)
    rig.check()


def test_only_the_prompt_itself_waits_for_its_copies() -> None:
    rig = Rig(num_blocks=32)
    first, short = text(1, 41), text(3, 10)
    rig.compute("first", first)
    rig.compute("other", text(2, 128))
    rig.prompt("again", first)
    rig.prompt("short", short)
    rig.worker.step()
    assert "short" in rig.tokens
    assert "again" not in rig.tokens
    assert not rig.worker.step()  # it waits for news
    rig.copy()
    assert rig.worker.step()
    rig.right("again", first)
    assert rig.cached("again") == 40
    rig.check()


def test_the_next_in_line_are_fetched_while_others_compute() -> None:
    rig = Rig(num_blocks=32, max_batched_tokens=16)
    first = text(1, 17)
    rig.compute("first", first)
    rig.compute("other", text(2, 128))
    rig.prompt("long", text(3, 48))
    rig.prompt("again", first)
    rig.worker.step()
    assert rig.returning == 4
    rig.run_with_copies()
    assert rig.cached("again") == 16
    rig.check()


def test_a_prompt_that_is_next_but_has_no_room_yet_begins_when_there_is() -> None:
    rig = Rig(num_blocks=16, max_batched_tokens=16)
    first, long = text(1, 33), text(3, 60)
    rig.compute("first", first)
    rig.compute("other", text(2, 64))
    rig.prompt("long", long)
    rig.worker.step()
    rig.prompt("again", first)
    rig.run_with_copies()
    rig.right("long", long)
    rig.right("again", first)
    rig.check()


@pytest.mark.parametrize("command", [Remove, TakeBack])
def test_a_prompt_that_goes_while_its_blocks_come_leaves_nothing(command: type[Remove | TakeBack]) -> None:
    rig = Rig()
    first = text(1, 41)
    rig.compute("first", first)
    rig.compute("other", text(2, 64))
    rig.prompt("again", first)
    rig.worker.step()
    rig.worker.handle(command(("again", 1)))
    assert not rig.worker.has_work()
    rig.copy()
    rig.run()
    rig.check()
    rig.prompt("later", first)
    rig.run()
    assert rig.cached("later") == 40  # they came all the same
    rig.check()


def test_blocks_that_come_back_wrong_are_computed() -> None:
    rig = Rig()
    first = text(1, 41)
    rig.compute("first", first)
    rig.compute("other", text(2, 64))
    for its in rig.tier._kept.by_group[0].values():
        its.memory[0] ^= 1
    rig.compute("again", first)
    assert rig.cached("again") == 0
    assert rig.told["wrong"] == 10
    rig.check()


def test_two_prompts_that_take_each_others_blocks_begin_at_last() -> None:
    """A pool that holds only one of them. None waits for its blocks for ever."""
    rig = Rig(num_blocks=12)
    first, second = text(1, 45), text(2, 45)
    rig.compute("first", first)
    rig.compute("second", second)
    rig.compute("other", text(3, 45))
    rig.prompt("first again", first)
    rig.prompt("second again", second)
    rig.run_with_copies()
    rig.right("first again", first)
    rig.right("second again", second)
    rig.check()


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (10, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_random_chats_on_a_small_pool_get_the_same_tokens_as_on_a_large_one(
    seed: int, windows: tuple[int | None, ...], has_thread: bool
) -> None:
    chance = random.Random(seed)
    rig = Rig(
        num_blocks=24,
        num_kept=chance.choice([60, 800]),
        windows=windows,
        num_stages=chance.choice([1, 1, 2]),
        max_batched_tokens=chance.choice([8, 16, 64]),
    )
    chats: list[list[int]] = [text(number, 5) for number in range(12)]
    prompts: dict[str, list[int]] = {}
    removed: set[str] = set()
    if has_thread:
        rig.tier.start()
    for number in range(160):
        name, chat = f"{number}", chance.choice(chats)
        chat += [chance.randrange(1000) for _ in range(chance.randint(1, 12))]
        if len(chat) > 70:
            del chat[chance.randint(5, 20) :]
        prompts[name] = list(chat)
        rig.prompt(name, prompts[name])
        for _ in range(chance.randint(0, 4)):
            if not has_thread:
                rig.tier.work()
            if rig.worker.has_work():
                rig.worker.step()
            rig.scheduler.check_integrity()
        if chance.random() < 0.1:
            gone = chance.choice(list(prompts))
            rig.worker.handle(Remove((gone, 1)))
            removed.add(gone)
        if has_thread and number < 80:  # a thread that never has its turn would miss every block
            rig.wait_for_copies()
    if has_thread:
        rig.run_until_done()
    else:
        rig.run_with_copies()
    rig.tier.close()
    rig.run()
    for name, prompt in prompts.items():
        if name in rig.tokens:
            rig.right(name, prompt)
    assert set(prompts) == set(rig.tokens) | removed
    assert rig.told["wrong"] == 0
    assert rig.told["returned"] > 0
    rig.check()
