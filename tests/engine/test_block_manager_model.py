"""The block manager, step by step at random, against a model of plain lists that does the same the slow way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.common.block_hash import chain_hashes
from kvrelay.common.retention import DEFAULT_PRIORITY, Retention
from kvrelay.engine.block_manager import BlockManager, Ledger, Owner, OwnerKind

NUM_BLOCKS = 7
CHAINS = st.lists(st.integers(0, 1), max_size=6)  # few different tokens: many common prefixes
SOME = st.integers(0, 50)
MAX_RETAINED = 3
RETENTIONS = st.none() | st.builds(
    Retention, priority=st.sampled_from([0, 35, 36, 80]), ttl_s=st.none() | st.sampled_from([1.0, 5.0])
)


@dataclass
class Model:
    """Blocks by id; ``cached`` is in the order in which they came, ``claims`` has all (priority, end) that were asked for."""

    free: set[int] = field(default_factory=lambda: set(range(NUM_BLOCKS)))
    cached: list[int] = field(default_factory=list)
    owned: dict[Owner, list[int]] = field(default_factory=dict)
    published: dict[bytes, int] = field(default_factory=dict)
    claims: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    now_s: float = 0.0

    def priority(self, block_id: int) -> int:
        """The highest that holds now."""
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
        """A fresh block was given: it must be a free one, or else the next to evict."""
        if self.free:
            assert block_id in self.free
            self.free.remove(block_id)
            return
        assert block_id == min(self.cached, key=self.priority)  # of several the first
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
        if len(self.retained()) > MAX_RETAINED:
            lowest = min(self.retained(), key=self.priority)
            self.claims[lowest] = [(DEFAULT_PRIORITY, math.inf)]

    def ledger(self) -> Ledger:
        held = {block_id for blocks in self.owned.values() for block_id in blocks}
        leased = {block_id for owner, blocks in self.owned.items() for block_id in blocks if owner.kind == "lease"}
        return Ledger(NUM_BLOCKS, len(self.free), len(self.cached), len(leased), len(held - leased))


class AgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        share = (MAX_RETAINED + 0.5) / NUM_BLOCKS
        self.blocks = BlockManager(NUM_BLOCKS, 1, lambda: self.model.now_s, max_retained_share=share)
        self.chains: dict[Owner, list[bytes]] = {}
        self.known: set[bytes] = set()
        self.count = 0

    def new_owner(self, *, leased: bool = False) -> Owner:
        self.count += 1
        return Owner(OwnerKind.LEASE if leased else OwnerKind.SEQUENCE, str(self.count))

    def pick(self, number: int) -> Owner | None:
        return list(self.model.owned)[number % len(self.model.owned)] if self.model.owned else None

    @rule(tokens=CHAINS, num_more=st.integers(0, 3), leased=st.booleans())
    def allocate(self, tokens: list[int], num_more: int, leased: bool) -> None:
        owner, chain = self.new_owner(leased=leased), chain_hashes(b"", tokens, 1)
        self.known |= set(chain)
        model, shared = self.model, self.model.prefix(chain)
        num_fresh = len(chain) + num_more - len(shared)
        has_room = num_fresh <= len(model.free) + len([one for one in model.cached if one not in shared])
        given = self.blocks.allocate(owner, len(chain) + num_more, chain)
        assert (given is not None) == has_room
        if given is None:
            return
        assert given.num_cached == len(shared)
        assert given.block_ids[: len(shared)] == shared
        model.cached = [one for one in model.cached if one not in shared]
        for block_id in given.block_ids[len(shared) :]:
            model.take(block_id)
        model.owned[owner], self.chains[owner] = list(given.block_ids), chain

    @rule(number=SOME, num_blocks=st.integers(0, 4))
    def extend(self, number: int, num_blocks: int) -> None:
        owner = self.pick(number)
        if owner is None:
            return
        has_room = num_blocks <= len(self.model.free) + len(self.model.cached)
        fresh = self.blocks.extend(owner, num_blocks)
        assert (fresh is not None) == has_room
        for block_id in fresh or []:
            self.model.take(block_id)
            self.model.owned[owner].append(block_id)

    @rule(number=SOME, end=st.integers(1, 6))
    def publish(self, number: int, end: int) -> None:
        owner = self.pick(number)
        if owner is None:
            return
        for index, block_hash in enumerate(self.chains[owner][:end]):
            self.blocks.publish(owner, index, block_hash)
            block_id = self.model.owned[owner][index]
            if block_id not in self.model.published.values():
                self.model.published.setdefault(block_hash, block_id)

    @rule(number=SOME, retention=RETENTIONS)
    def release(self, number: int, retention: Retention | None) -> None:
        owner = self.pick(number)
        if owner is not None:
            self.blocks.release(owner, retention)
            self.model.release(owner, retention)
            del self.chains[owner]

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now_s += seconds

    @rule(number=SOME, leased=st.booleans())
    def hand_on(self, number: int, leased: bool) -> None:
        owner = self.pick(number)
        if owner is not None:
            new = self.new_owner(leased=leased)
            self.blocks.hand_on(owner, new)
            self.model.owned[new], self.chains[new] = self.model.owned.pop(owner), self.chains.pop(owner)

    @rule(number=SOME, num_blocks=st.integers(0, 6), leased=st.booleans())
    def fork(self, number: int, num_blocks: int, leased: bool) -> None:
        owner = self.pick(number)
        if owner is None:
            return
        new, held = self.new_owner(leased=leased), self.model.owned[owner]
        if num_blocks > len(held):
            with pytest.raises(ValueError, match=f"not {num_blocks}"):
                self.blocks.fork(owner, new, num_blocks)
            return
        assert self.blocks.fork(owner, new, num_blocks) == held[:num_blocks]
        self.model.owned[new], self.chains[new] = held[:num_blocks], self.chains[owner][:num_blocks]

    @rule(number=SOME, index=st.integers(0, 5))
    def make_writable(self, number: int, index: int) -> None:
        owner = self.pick(number)
        if owner is None or index >= len(self.model.owned[owner]):
            return
        model, block_id = self.model, self.model.owned[owner][index]
        is_shared = any(block_id in blocks for other, blocks in model.owned.items() if other != owner)
        is_known = block_id in model.published.values()
        given = self.blocks.make_writable(owner, index)
        if not is_shared and not is_known:
            assert given == block_id
        elif not model.free and not model.cached:
            assert given is None
        else:
            assert given is not None
            model.take(given)
            model.owned[owner][index] = given
            if not is_shared:
                model.shelve(block_id)
        if given is not None:
            self.chains[owner] = self.chains[owner][:index]  # it will have another content than the prefix promised

    @rule(number=SOME, other=SOME)
    def misuse_changes_nothing(self, number: int, other: int) -> None:
        owner, taken = self.pick(number), self.pick(other)
        if owner is None or taken is None:
            return
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.allocate(owner, 1)
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.hand_on(owner, taken)
        with pytest.raises(ValueError, match="already holds"):
            self.blocks.fork(owner, taken, 0)
        nobody = self.new_owner()
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

    @invariant()
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


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
