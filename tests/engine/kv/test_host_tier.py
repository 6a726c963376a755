"""Blocks that leave the pool come back from the host's memory with the right bytes, or do not come back."""

from __future__ import annotations

import mmap
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrelay.common.block_hash import HashChain
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.kv.host_tier import HostTier
from kvrelay.engine.kv.lower_tier import Fetch
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.step.interface import BlockStore

from ..late_device import LateDevice

BLOCK = 4
TOKEN_NBYTES = 32
WAYS = [
    *("plain", "ranks", "staged", "hashing", "direct"),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
Windows = tuple[int | None, ...]


def geometry_of(windows: Windows) -> KvGeometry:
    groups = tuple(
        KvGroup(
            kind=GroupKind.FULL if window is None else GroupKind.WINDOW,
            window=window,
            layers=(number,),
            num_kv_heads=1,
            key_size=TOKEN_NBYTES,
            value_size=0,
            dtype="uint8",
        )
        for number, window in enumerate(windows)
    )
    return KvGeometry(groups=groups, block_size=BLOCK)


def device_of(way: str, chance: random.Random | None = None) -> LateDevice | None:
    if way in ("plain", "ranks", "cuda"):
        return None
    return LateDevice(chance, hashes=way in ("hashing", "direct"), reaches=way == "direct")


class Rig:
    """A pool, its blocks and the tier. ``computed`` writes what stands for K/V; the test calls ``work``."""

    def __init__(
        self,
        windows: Windows = (None,),
        num_blocks: int = 8,
        num_kept: int = 64,
        way: str = "plain",
        chance: random.Random | None = None,
    ) -> None:
        geometry = geometry_of(windows)
        num_physical = num_blocks * len(windows)
        self.device = device = device_of(way, chance)
        nbytes = geometry.physical_nbytes
        on, staging = torch.device("cpu"), None if device is None else StagingPlan(device, 6 * nbytes)
        if way == "cuda":
            on, staging = torch.device("cuda"), StagingPlan(CudaCopies(torch.device("cuda")), 6 * nbytes)
        self.pool = KvPool(geometry, num_physical, on, staging=staging)
        self.blocks = BlockManager(num_physical, BLOCK, lambda: 0.0, windows=windows)
        self.blocks.leaves_owed = True
        store: BlockStore = self.pool
        if way == "ranks":
            store = GatheredStore(geometry, num_physical, [HostPart(self.pool.blocks.numpy())])
        self.told: Counter[str] = Counter()
        self._changed = threading.Condition()
        self.num_returned = 0
        self.memory = memoryview(mmap.mmap(-1, num_kept * nbytes))
        self.tier = HostTier(store, self.blocks, geometry, self.memory, tell=self._hear, on_returned=self._on_returned)
        self.blocks.attach(self.tier)
        self._num_sequences = 0

    def _hear(self, event: str, number: int) -> None:
        self.told[event] += number

    def _on_returned(self) -> None:
        with self._changed:
            self.num_returned += 1
            self._changed.notify()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for fetches on the tier's thread."""
        with self._changed:
            assert self._changed.wait_for(is_so, 30)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a sequence would find blocks; fetches hold some."""
        return self.blocks.num_allocatable >= num_blocks * self.blocks.num_groups

    @staticmethod
    def hashes(tokens: list[int]) -> list[bytes]:
        return HashChain(b"model", BLOCK).hashes(tokens, len(tokens) // BLOCK)

    def content(self, group: int, block_hash: bytes) -> torch.Tensor:
        random_bytes = random.Random(block_hash + bytes([group])).randbytes(self.pool.block_nbytes)
        return torch.frombuffer(bytearray(random_bytes), dtype=torch.uint8).to(self.pool.blocks.device)

    def compute(self, tokens: list[int], source: str | None = None) -> int:
        """A sequence of these tokens comes and goes. Returns its cached blocks, whose bytes are compared."""
        self._num_sequences += 1
        owner, hashes = sequence_owner((str(self._num_sequences), 1)), self.hashes(tokens)
        allocation = self.blocks.allocate(owner, len(hashes), hashes, is_whole=True)
        assert allocation is not None
        if source is not None:
            self.blocks.came_from(owner, source)
        self.pool.order_steps()  # a step is launched
        for group in range(self.blocks.num_groups):
            owned = self.blocks.owned_blocks(owner, group)
            for index, (block_id, block_hash) in enumerate(zip(owned, hashes, strict=True)):
                if block_id is None:
                    continue
                content = self.content(group, block_hash)
                if index < allocation.num_cached:
                    assert torch.equal(self.pool.blocks[block_id], content), f"block {index} of group {group}"
                else:
                    self.pool.blocks[block_id] = content
        if self.pool.blocks.is_cuda:
            torch.cuda.synchronize()  # the step has returned
        for index in range(allocation.num_cached, len(hashes)):
            self.blocks.publish(owner, index, hashes[index])
        self.blocks.release(owner)
        return allocation.num_cached

    def work(self) -> None:
        while self.tier.work():
            pass

    def fetch(self, tokens: list[int]) -> Fetch | None:
        """Fetch what a prompt of these tokens and one more begins with, and let it come."""
        fetch = self.tier.fetch(self.hashes(tokens))
        self.work()
        return fetch

    def check(self) -> None:
        self.blocks.check_integrity()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, f"somebody still holds blocks: {ledger}"
        self.tier.check_integrity()


def tokens_of(text: int, num_blocks: int) -> list[int]:
    return [1000 * text + position for position in range(num_blocks * BLOCK)]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_what_left_the_pool_comes_back(way: str, windows: Windows) -> None:
    rig = Rig(windows, way=way)
    text, other = tokens_of(1, 6), tokens_of(2, 8)
    rig.compute(text)
    rig.work()
    assert rig.told == {"kept": 6 * len(windows)}
    rig.compute(other)  # takes all blocks
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 0
    fetch = rig.fetch(text)
    assert fetch is not None
    assert fetch.is_done
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 6
    assert rig.told["tokens"] == 6 * BLOCK
    assert rig.num_returned == 1
    num_seen = sum(6 if window is None else -(-(window - 1) // BLOCK) for window in windows)
    assert rig.told["returned"] == num_seen  # a group with a window gets what the next token sees
    rig.check()
    if way == "direct":
        assert rig.device is not None
        assert rig.device.num_direct == 6 * len(windows) + num_seen + rig.told["kept"] - 6 * len(windows)
    rig.tier.close()
    assert rig.device is None or not rig.device.registered


def test_only_what_the_pool_lacks_is_copied() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 4))  # the pool's tail of the first one goes
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 4
    rig.fetch(text)
    assert rig.told["returned"] == 2
    assert rig.compute(text) == 6
    rig.check()


def test_what_is_not_worth_it_is_not_fetched() -> None:
    rig = Rig(num_blocks=20)
    rig.compute(tokens_of(1, 2))
    rig.work()
    rig.compute(tokens_of(2, 20))
    long = [*tokens_of(1, 2), *tokens_of(3, 17)]
    for tokens, is_worth_it in ((tokens_of(4, 2), False), (long, False), (long[: 16 * BLOCK], True)):
        before = rig.num_returned
        fetch = rig.fetch(tokens)
        assert fetch is not None
        assert fetch.is_done
        assert rig.num_returned - before == is_worth_it
    assert rig.fetch(long[: 16 * BLOCK]).is_done  # type: ignore[union-attr]
    assert rig.num_returned == 1  # the pool has it now
    rig.check()


def test_without_room_nothing_is_fetched_and_nothing_changes() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    owner = sequence_owner(("runs", 1))
    rig.blocks.allocate(owner, 3)
    before = rig.blocks.ledger()
    assert rig.tier.fetch(rig.hashes(text)) is None
    assert rig.blocks.ledger() == before
    rig.blocks.release(owner)
    assert rig.fetch(text) is not None
    assert rig.compute(text) == 6
    rig.check()


def test_two_prompts_share_a_fetch() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    first, second = rig.tier.fetch(rig.hashes(text)), rig.tier.fetch(rig.hashes(text[: 4 * BLOCK]))
    assert first is second is not None
    rig.work()
    assert (first.is_done, rig.told["returned"]) == (True, 6)
    rig.check()


def test_copies_out_hold_no_block() -> None:
    """A full pool that is still being copied has room for a sequence as large as the pool."""
    rig = Rig()
    rig.compute(tokens_of(1, 8))
    assert rig.tier.num_queued == 8
    assert rig.blocks.num_allocatable == 8
    rig.compute(tokens_of(2, 8))
    assert rig.told == {"missed": 8}
    rig.work()
    assert rig.told == {"missed": 8, "kept": 8}
    rig.check()


@pytest.mark.parametrize("at", ["begin", "wait"])
@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_the_pool_takes_in_the_midst_of_its_copy_is_not_kept(
    way: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content that another text has written to the block must not be found under the first one's hash."""
    rig = Rig(way=way)
    first, second = tokens_of(1, 8), tokens_of(2, 8)
    rig.compute(first)
    _interrupt(rig, lambda: rig.compute(second), at, monkeypatch)
    rig.work()
    assert rig.told == {"missed": 8, "kept": 8}  # those of the second text
    rig.compute(tokens_of(3, 8))
    assert rig.fetch(first) is not None
    assert rig.told["returned"] == 0
    rig.fetch(second)
    assert rig.compute(second) == 8
    rig.check()


def _interrupt(rig: Rig, act: Callable[[], object], at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen once, when copies out have begun (``at`` "begin": the first one), before any is waited for."""
    out = rig.tier._out
    done: list[bool] = []

    def once() -> None:
        if not done:
            done.append(True)
            act()

    if at == "wait":
        finish = out._finish
        monkeypatch.setattr(out, "_finish", lambda *args: (once(), finish(*args)))
    else:
        open_next = out._open_next

        def opened() -> object:
            copy = open_next()
            once()
            return copy

        monkeypatch.setattr(out, "_open_next", opened)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_changed_in_the_hosts_memory_are_not_used(way: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(way=way)
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    rig.work()
    wrong = rig.tier._kept.by_group[0][rig.hashes(text)[3]]
    wrong.memory[17] ^= 4
    rig.fetch(text)
    assert (rig.told["wrong"], rig.told["returned"], rig.told["tokens"]) == (1, 5, 3 * BLOCK)
    assert "came back from the host's memory with other bytes" in caplog.text
    assert rig.compute(text) == 3
    rig.check()
    rig.work()
    assert rig.tier.num_kept == 6 + 8  # it is kept anew


@pytest.mark.parametrize("way", ["hashing", "direct"])
def test_bytes_that_a_copy_changes_are_found(way: str) -> None:
    """In either direction: the device's digests are of the pool's memory, before the copy out and after the copy in."""
    rig = Rig(way=way)
    device = rig.device
    assert device is not None
    text, other = tokens_of(1, 6), tokens_of(2, 6)
    device.flips = True
    rig.compute(text)
    rig.work()
    device.flips = False
    rig.compute(other)
    rig.work()
    rig.compute(tokens_of(3, 8))
    rig.fetch(text)
    assert (rig.told["wrong"], rig.told["returned"]) == (6, 0)
    device.flips = True
    rig.fetch(other)
    assert (rig.told["wrong"], rig.told["returned"]) == (12, 0)
    rig.check()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_distrusted_worker_computed_leaves_the_tier(way: str) -> None:
    rig = Rig(way=way)
    rig.compute(tokens_of(1, 3), source="wrong")
    rig.compute(tokens_of(2, 3), source="right")
    rig.work()
    rig.compute(tokens_of(3, 8))
    rig.work()
    coming = rig.tier.fetch(rig.hashes(tokens_of(1, 3)))
    assert coming is not None
    rig.blocks.distrust("wrong")  # also what is on its way
    rig.work()
    assert coming.is_done
    assert rig.tier.num_kept == 3 + 8
    assert rig.compute(tokens_of(1, 3)) == 0
    rig.fetch(tokens_of(2, 3))
    assert rig.blocks.distrust("right")[0] == 3  # what came back has kept its source
    rig.check()


@pytest.mark.parametrize("at", ["before", "within"])
def test_what_is_copied_while_its_worker_becomes_distrusted_is_not_kept(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a copy ends while the pool's blocks are dropped."""
    rig = Rig(way="direct")
    rig.compute(tokens_of(1, 3), source="wrong")
    if at == "before":
        _interrupt(rig, lambda: rig.blocks.distrust("wrong"), "wait", monkeypatch)
    else:
        drop_from = rig.blocks._physical.drop_from
        monkeypatch.setattr(rig.blocks._physical, "drop_from", lambda source: (rig.work(), drop_from(source))[1])
        rig.blocks.distrust("wrong")
    rig.work()
    assert rig.tier.num_kept == 0
    rig.check()


def test_what_comes_back_while_its_worker_becomes_distrusted_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(way="direct")
    rig.compute(tokens_of(1, 3), source="wrong")
    rig.work()
    rig.compute(tokens_of(3, 8))
    land = rig.tier._land
    monkeypatch.setattr(rig.tier, "_land", lambda *args: (land(*args), rig.blocks.distrust("wrong")))
    rig.fetch(tokens_of(1, 3))
    assert rig.told["returned"] == 3
    assert rig.blocks.num_cached_prefix(rig.hashes(tokens_of(1, 3))) == 0
    rig.check()


@pytest.mark.parametrize("at", ["out", "in"])
@pytest.mark.parametrize("way", ["staged", "hashing", "direct"])
def test_a_copy_that_fails_ends_the_tier_and_nothing_else(way: str, at: str) -> None:
    rig = Rig(way=way)
    device = rig.device
    assert device is not None
    text, fetches = tokens_of(1, 6), []
    rig.compute(text)
    if at == "in":
        rig.work()
        rig.compute(tokens_of(2, 2))
        rig.work()
        rig.compute(tokens_of(3, 8))
        fetches = [rig.tier.fetch(rig.hashes(one)) for one in (text, tokens_of(2, 2))]
    device._is_broken = True
    rig.tier.start()
    rig.tier._thread.join(10)
    assert not rig.tier._thread.is_alive()
    assert all(one is not None and one.is_done for one in fetches)
    later = rig.tier.fetch(rig.hashes(text))
    assert later is not None
    assert later.is_done
    rig.check()
    rig.tier.close()
    rig.check()


def test_an_unfinished_fetch_is_over_when_the_tier_closes() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None
    rig.tier.close()
    assert (fetch.is_done, rig.num_returned) == (True, 1)
    rig.check()
    rig.compute(text)  # the block manager goes on
    assert rig.tier.num_queued == 0


def test_a_tier_that_is_over_takes_no_blocks_of_the_pool() -> None:
    """What it had does not come any more. The pool's cached blocks must not leave for it."""
    rig = Rig(way="direct")
    text, other = tokens_of(1, 6), tokens_of(2, 8)
    rig.compute(text)
    rig.work()
    rig.compute(other)
    rig.tier.close()
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None
    assert fetch.is_done
    assert rig.tier.num_kept == 0
    assert rig.compute(other) == 8
    rig.check()


def test_a_prompt_does_not_wait_for_ever_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None

    def wait() -> bytes:
        raise TypeError("a bug")

    monkeypatch.setattr(rig.pool, "begin_write", lambda *_: wait)
    rig.tier.start()
    rig.tier._thread.join(10)
    assert not rig.tier._thread.is_alive()
    assert fetch.is_done
    rig.check()


def test_every_published_block_is_kept_or_counted_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that found no slot of staging in time."""
    rig = Rig(way="staged")
    monkeypatch.setattr("kvrelay.engine.kv.copies_out._SLOT_S", 0.0)
    monkeypatch.setattr(rig.pool._staging, "_wait_for_slot", lambda *_: False)
    rig.compute(tokens_of(1, 6))
    rig.work()
    assert rig.told == {"missed": 6}
    rig.check()


def test_the_least_recently_used_leave_first_and_of_a_prefix_its_tail() -> None:
    rig = Rig(num_kept=12)
    first, second, third = (tokens_of(text, 6) for text in (1, 2, 3))
    for text in (first, second, third):  # each takes blocks of the one before
        rig.compute(text)
        rig.work()
    kept = [[one in rig.tier._kept.by_group[0] for one in rig.hashes(text)] for text in (first, second, third)]
    assert kept == [[False] * 6, [True] * 6, [True] * 6]
    rig.compute(tokens_of(4, 3))
    rig.work()
    kept = [[one in rig.tier._kept.by_group[0] for one in rig.hashes(text)] for text in (second, third)]
    assert kept == [[True] * 3 + [False] * 3, [True] * 6], "a block without those before it is of no use"
    rig.check()


def test_a_sender_reads_the_same_block_meanwhile() -> None:
    """A hand-off's read of a block and the tier's share one copy, and each ends its own."""
    rig = Rig(way="staged")
    owner, hashes = sequence_owner(("a", 1)), rig.hashes(tokens_of(1, 2))
    allocation = rig.blocks.allocate(owner, 2, hashes)
    assert allocation is not None
    ((block_id, _),) = allocation.block_tables
    rig.pool.blocks[block_id] = rig.content(0, hashes[0])
    read = rig.pool.open_read(block_id)
    rig.blocks.publish(owner, 0, hashes[0])
    rig.work()
    view = read.wait(_Reader(), 1.0)  # type: ignore[union-attr]
    assert view is not None
    assert bytes(view) == rig.content(0, hashes[0]).numpy().tobytes()
    rig.pool.close_read(block_id)
    rig.blocks.release(owner)
    assert rig.told == {"kept": 1}
    rig.check()


class _Reader:
    is_done = False


class Chat:
    """Texts that go on where others have stopped, or branch off."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._texts: list[list[int]] = [[]]

    def next(self) -> list[int]:
        text = list(self._chance.choice(self._texts[-12:]))
        if self._chance.random() < 0.3:
            text = text[: self._chance.randint(0, 4) * BLOCK]
        text = [*text[: 7 * BLOCK], *tokens_of(len(self._texts), self._chance.randint(1, 3))]
        self._texts.append(text)
        return text


@pytest.mark.parametrize("windows", [(None,), (None, 6), (2, 10)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_random_texts_find_the_right_bytes(
    way: str, windows: Windows, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are carried out late, and the pool takes blocks in their midst."""
    chance = random.Random(seed)
    rig = Rig(windows, num_blocks=10, num_kept=chance.choice([20, 60, 200]), way=way, chance=random.Random(seed))
    chat, finish = Chat(chance), rig.tier._out._finish

    def interrupted(*args: Any) -> None:
        if chance.random() < 0.1:
            rig.compute(tokens_of(10_000 + chance.randint(0, 100), chance.randint(1, 4)))
        finish(*args)

    monkeypatch.setattr(rig.tier._out, "_finish", interrupted)
    num_found = 0
    for _ in range(150):
        text = chat.next()
        fetch = rig.tier.fetch(rig.hashes(text))
        if fetch is None or not fetch.is_done or chance.random() < 0.7:
            for _ in range(chance.randint(1, 6)):
                rig.tier.work()
        while rig.tier._returns:
            rig.tier.work()
        num_found += rig.compute(text)
        rig.blocks.check_integrity()
    rig.work()
    rig.check()
    assert num_found > 50
    assert rig.told["tokens"] > 20 * BLOCK
    assert rig.told["wrong"] == 0
    assert rig.told["missed"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_the_thread_copies_beside_everything_else(way: str, seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig((None, 6), num_blocks=10, num_kept=200, way=way, chance=random.Random(seed))
    chat, num_found = Chat(chance), 0
    rig.tier.start()
    for _ in range(150):
        text = chat.next()
        fetch = rig.tier.fetch(rig.hashes(text)) if chance.random() < 0.7 else None
        if fetch is not None and chance.random() < 0.7:
            rig.wait_until(lambda fetch=fetch: fetch.is_done)  # type: ignore[misc]
        rig.wait_until(lambda text=text: rig.has_room(len(text) // BLOCK))  # type: ignore[misc]
        num_found += rig.compute(text)
    assert not rig.tier._is_over, "the tier has failed"
    rig.tier.close()
    rig.check()
    assert num_found
    assert rig.told["wrong"] == 0
