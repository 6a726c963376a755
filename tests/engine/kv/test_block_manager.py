"""The block manager against a model of plain lists, by random actions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.retention import DEFAULT_PRIORITY, Retention
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.ledger import Ledger
from kvrelay.engine.kv.owners import Owner, OwnerKind, sequence_owner

NUM_BLOCKS = 7
MAX_RETAINED = 2


@dataclass
class Model:
    """Blocks by id. ``cached`` is in order of arrival. ``claims`` has every requested (priority, end)."""

    free: set[int] = field(default_factory=lambda: set(range(NUM_BLOCKS)))
    cached: list[int] = field(default_factory=list)
    owned: dict[Owner, list[int]] = field(default_factory=dict)
    published: dict[bytes, int] = field(default_factory=dict)
    claims: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    now_s: float = 0.0

    def priority(self, block_id: int) -> int:
        """The highest claim that is valid now."""
        return max(
            (one for one, end_s in self.claims.get(block_id, []) if end_s > self.now_s), default=DEFAULT_PRIORITY
        )

    def retained(self) -> dict[int, int]:
        return {one: self.priority(one) for one in self.cached if self.priority(one) > DEFAULT_PRIORITY}

    def claim(self, block_id: int, retention: Retention) -> None:
        is_raised = retention.priority > DEFAULT_PRIORITY
        has_end = is_raised and retention.ttl_s is not None
        self.claims.setdefault(block_id, []).append(
            (retention.priority, self.now_s + (retention.ttl_s or 0.0) if has_end else math.inf)
        )
        if is_raised:
            self.claims[block_id].append((DEFAULT_PRIORITY, math.inf))

    def prefix(self, hashes: list[bytes]) -> list[int]:
        found: list[int] = []
        while len(found) < len(hashes) and hashes[len(found)] in self.published:
            found.append(self.published[hashes[len(found)]])
        return found

    def take(self, block_id: int) -> None:
        """Check that a fresh block was a free one, or else the next to evict."""
        if self.free:
            assert block_id in self.free
            self.free.remove(block_id)
            return
        assert block_id == min(self.cached, key=self.priority)  # the first of several
        self.cached.remove(block_id)
        self.claims.pop(block_id, None)
        self.published = {key: value for key, value in self.published.items() if value != block_id}

    def release(self, owner: Owner, retention: Retention | None) -> None:
        blocks = self.owned.pop(owner)
        held = {block_id for others in self.owned.values() for block_id in others}
        for block_id in reversed(blocks):
            if owner.kind is OwnerKind.SEQUENCE:
                self.claim(block_id, retention or Retention())
            if block_id in held:
                continue
            if block_id in self.published.values():
                self.shelve(block_id)
            else:
                self.free.add(block_id)
                self.claims.pop(block_id, None)

    def shelve(self, block_id: int) -> None:
        self.cached.append(block_id)
        self.claims.setdefault(
            block_id, [(DEFAULT_PRIORITY, math.inf)]
        )  # blocks left by a lease have the default priority
        if len(self.retained()) > MAX_RETAINED:
            lowest = min(self.retained(), key=self.priority)
            self.claims[lowest] = [(DEFAULT_PRIORITY, math.inf)]

    def ledger(self) -> Ledger:
        held = {block_id for blocks in self.owned.values() for block_id in blocks}
        leased = {block_id for owner, blocks in self.owned.items() for block_id in blocks if owner.kind == "lease"}
        return Ledger(NUM_BLOCKS, len(self.free), len(self.cached), len(leased), len(held - leased))


class AgainstModel:
    """Does each random action to both and compares the results."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.model = Model()
        share = (MAX_RETAINED + 0.5) / NUM_BLOCKS
        self.blocks = BlockManager(NUM_BLOCKS, 1, lambda: self.model.now_s, max_retained_share=share)
        self.chains: dict[Owner, list[bytes]] = {}
        self.known: set[bytes] = set()
        self.count = 0

    def new_owner(self) -> Owner:
        self.count += 1
        return Owner(self.chance.choice((OwnerKind.LEASE, OwnerKind.SEQUENCE)), str(self.count))

    def pick(self) -> Owner:
        return self.chance.choice(list(self.model.owned))

    def allocate(self) -> None:
        # Two token values give many common prefixes.
        tokens = self.chance.choices((0, 1), k=self.chance.randint(0, 6))
        owner, chain = self.new_owner(), HashChain(b"model", 1).hashes_of_all(tokens)
        self.known |= set(chain)
        model, shared = self.model, self.model.prefix(chain)
        num_blocks, spare = len(chain) + self.chance.randint(0, 2), self.chance.choice((0, 0, 1, 2))
        num_fresh = num_blocks - len(shared)
        has_room = num_fresh + spare <= len(model.free) + len([one for one in model.cached if one not in shared])
        given = self.blocks.allocate(owner, num_blocks, chain, spare=spare)
        assert (given is not None) == has_room
        if given is None:
            return
        assert given.num_cached == len(shared)
        assert given.block_tables[0][: len(shared)] == shared
        model.cached = [one for one in model.cached if one not in shared]
        for block_id in given.block_tables[0][len(shared) :]:
            model.take(block_id)
        model.owned[owner], self.chains[owner] = list(given.block_tables[0]), chain

    def extend(self) -> None:
        owner, num_blocks = self.pick(), self.chance.randint(0, 4)
        has_room = num_blocks <= len(self.model.free) + len(self.model.cached)
        fresh = self.blocks.extend(owner, len(self.model.owned[owner]) + num_blocks)
        assert (fresh is not None) == has_room
        for block_id in [] if fresh is None else fresh[0]:
            self.model.take(block_id)
            self.model.owned[owner].append(block_id)

    def publish(self) -> None:
        owner = self.pick()
        for index, block_hash in enumerate(self.chains[owner][: self.chance.choice((1, 6, 6))]):
            self.blocks.publish(owner, index, block_hash)
            block_id = self.model.owned[owner][index]
            if block_id not in self.model.published.values():
                self.model.published.setdefault(block_hash, block_id)

    def release(self) -> None:
        owner, retention = self.pick(), None
        if self.chance.random() < 0.8:
            priority = self.chance.choice((0, 35, 36, 60, 80))
            retention = Retention(priority=priority, ttl_s=self.chance.choice((None, 1.0, 5.0)))
        self.blocks.release(owner, retention)
        self.model.release(owner, retention)
        del self.chains[owner]

    def time_passes(self) -> None:
        self.model.now_s += self.chance.choice((0.5, 1.0, 4.0))

    def hand_on(self) -> None:
        owner, new = self.pick(), self.new_owner()
        self.blocks.hand_on(owner, new)
        self.model.owned[new], self.chains[new] = self.model.owned.pop(owner), self.chains.pop(owner)

    def fork(self) -> None:
        owner, num_blocks = self.pick(), self.chance.randint(0, 6)
        new, held = self.new_owner(), self.model.owned[owner]
        if num_blocks > len(held):
            with pytest.raises(ValueError, match=f"not {num_blocks}"):
                self.blocks.fork(owner, new, num_blocks)
            return
        assert self.blocks.fork(owner, new, num_blocks) == [held[:num_blocks]]
        self.model.owned[new], self.chains[new] = held[:num_blocks], self.chains[owner][:num_blocks]

    def make_writable(self) -> None:
        owner = self.pick()
        model, held = self.model, self.model.owned[owner]
        if not held:
            return
        index = self.chance.randrange(len(held))
        block_id = held[index]
        is_shared = any(block_id in blocks for other, blocks in model.owned.items() if other != owner)
        is_known = block_id in model.published.values()
        given = self.blocks.make_writable(owner, index)
        if not is_shared and not is_known:
            assert given == [block_id]
        elif not model.free and not model.cached:
            assert given is None
        else:
            assert given is not None
            model.take(given[0])
            held[index] = given[0]
            if not is_shared:
                model.shelve(block_id)
        if given is not None:
            self.chains[owner] = self.chains[owner][:index]  # the new content differs from the hashed prefix

    def misuse_changes_nothing(self) -> None:
        owner, taken, nobody = self.pick(), self.pick(), self.new_owner()
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.allocate(owner, 1)
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.hand_on(owner, taken)
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.fork(owner, taken, 0)
        with pytest.raises(ValueError, match="holds no blocks"):
            self.blocks.extend(nobody, 1)
        with pytest.raises(KeyError):
            self.blocks.hand_on(nobody, self.new_owner())
        with pytest.raises(KeyError):
            self.blocks.publish(nobody, 0, b"x")
        with pytest.raises(KeyError):
            self.blocks.fork(nobody, self.new_owner(), 0)
        with pytest.raises(KeyError):
            self.blocks.make_writable(nobody, 0)
        self.blocks.release(nobody)

    def agrees(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.ledger() == self.model.ledger()
        assert self.blocks.num_allocatable == len(self.model.free) + len(self.model.cached)
        assert self.blocks.retained() == self.model.retained()
        assert self.blocks.owners() == {owner: len(blocks) for owner, blocks in self.model.owned.items()}
        for owner, block_ids in self.model.owned.items():
            assert self.blocks.owned_blocks(owner) == block_ids
        for block_hash in self.known:
            assert self.blocks.num_cached_prefix([block_hash]) == (block_hash in self.model.published)


@pytest.mark.parametrize("seed", range(20))
def test_the_books_are_those_of_the_model(seed: int) -> None:
    both = AgainstModel(random.Random(seed))
    acts = (
        both.extend, both.fork, both.hand_on, both.make_writable, both.misuse_changes_nothing,
        *(both.publish, both.publish, both.publish, both.release, both.release, both.release, both.time_passes),
    )  # fmt: skip
    for _ in range(300):
        if not both.model.owned or both.chance.random() < 0.3:
            both.allocate()
        else:
            both.chance.choice(acts)()
        both.agrees()


def test_beams_of_one_search_are_owners_of_their_own() -> None:
    names = {sequence_owner(("r/1", 2), beam).key for beam in range(3)} | {sequence_owner(("r", 1), 2).key}
    assert names == {"r/1/2", "r/1/2#1", "r/1/2#2", "r/1#2"}


def test_what_contradicts_itself_is_refused() -> None:
    blocks, owner = BlockManager(4, 4, lambda: 0.0), Owner(OwnerKind.SEQUENCE, "a")
    with pytest.raises(ValueError, match="2 hashes for 1 blocks"):
        blocks.allocate(owner, 1, [b"x" * 16, b"y" * 16])
    blocks.allocate(owner, 1)
    blocks.publish(owner, 0, b"x" * 16)
    with pytest.raises(ValueError, match="is published as"):
        blocks.publish(owner, 0, b"y" * 16)
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockManager(0, 4, lambda: 0.0)
