"""Several groups of layers in one pool. A group with a window needs only a sequence's last blocks."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.kv_geometry import Chunk, GroupKind, KvGeometry, KvGroup, first_block
from kvrelay.engine.config.model import KvSizes
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.geometry import LayerGroups
from kvrelay.engine.kv.owned_tables import Tables
from kvrelay.engine.kv.owners import Owner, OwnerKind

FULL, WINDOW = 0, 1


def sequence(name: str) -> Owner:
    return Owner(OwnerKind.SEQUENCE, name)


def hashes(*tokens: int) -> list[bytes]:
    return HashChain(b"model", 1).hashes_of_all(tokens)


def two_groups(num_blocks: int = 16, window: int = 2, step: int = 1) -> BlockManager:
    """Blocks of one token. The next token sees itself and ``window`` - 1 tokens before it."""
    return BlockManager(num_blocks, 1, lambda: 0.0, windows=(None, window), max_step_tokens=step)


def publish(blocks: BlockManager, owner: Owner, *tokens: int) -> None:
    for index, block_hash in enumerate(hashes(*tokens)):
        blocks.publish(owner, index, block_hash)


def test_what_falls_out_of_a_window_another_sequence_gets() -> None:
    blocks, a, b = two_groups(12, step=4), sequence("a"), sequence("b")
    assert blocks.allocate(a, 6) is not None
    assert (blocks.num_allocatable, blocks.allocate(b, 1)) == (0, None)
    before = blocks.owned_blocks(a, WINDOW)
    assert blocks.slide(a, 5) == [[], []]
    assert blocks.owned_blocks(a, WINDOW) == [None] * 4 + before[4:]  # the next token sees one token before itself
    assert blocks.num_allocatable == 4
    second = blocks.allocate(b, 2)
    assert second is not None
    assert {*second.block_tables[FULL], *second.block_tables[WINDOW]} == {*before[:4]}
    assert (blocks.ledger(FULL).num_running, blocks.ledger(WINDOW).num_running) == (8, 4)
    assert blocks.slide(a, 3) == [[], []]  # fewer than before: no block is given back
    blocks.check_integrity()
    for owner in (a, b):
        blocks.release(owner)
    assert blocks.ledger().num_free == 12


def test_the_blocks_of_a_chunk_are_free_when_it_is_over() -> None:
    blocks, a = BlockManager(14, 1, lambda: 0.0, windows=(None, Chunk(3)), max_step_tokens=1), sequence("a")
    assert blocks.allocate(a, 7) is not None
    for num_computed in range(7):
        blocks.slide(a, num_computed)
        over = num_computed // 3 * 3
        owned = blocks.owned_blocks(a, WINDOW)
        assert owned[:over] == [None] * over
        assert None not in owned[over : num_computed + 1]
    blocks.check_integrity()


def test_who_goes_on_at_the_beginning_of_a_chunk_needs_no_block_of_it() -> None:
    assert [first_block(Chunk(8), position, 4) for position in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert first_block(Chunk(6), 7, 4) == 1  # a chunk may begin inside a block


def test_a_geometry_of_chunks_goes_over_the_wire() -> None:
    geometry = KvGeometry(
        groups=tuple(
            KvGroup(kind=kind, window=window, layers=(0,), num_kv_heads=1, key_size=8, value_size=8, dtype="float32")
            for kind, window in ((GroupKind.FULL, None), (GroupKind.WINDOW, 8), (GroupKind.WINDOW, Chunk(8)))
        ),
        block_size=4,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=KvGeometry) == geometry


def test_a_group_with_a_window_takes_what_it_needs_at_a_time_and_moves_on() -> None:
    """With a window of 3 and steps of 2, a prompt of any length holds at most 5 blocks of one token."""
    blocks, a = BlockManager(28, 1, lambda: 0.0, windows=(None, 3), max_step_tokens=2), sequence("a")
    given = blocks.allocate(a, 20)
    assert given is not None
    assert list(map(len, given.block_tables)) == [20, 5]
    assert blocks.num_physical_for(20) == 25
    tables = given.block_tables
    for num_computed in range(2, 21, 2):
        for table, fresh in zip(tables, blocks.slide(a, num_computed), strict=True):
            table.extend(fresh)
        assert len(tables[WINDOW]) >= min(20, num_computed + 2), "there is no room for the next step"
        assert blocks.ledger(WINDOW).num_running <= 5
        blocks.check_integrity()
    assert len(tables[WINDOW]) == 20
    assert blocks.ledger(WINDOW).num_running == 2  # for the token after the last


def test_a_prefix_is_found_if_the_window_s_last_blocks_are_there() -> None:
    blocks, a, b, c = two_groups(20), sequence("a"), sequence("b"), sequence("c")
    tokens = (1, 2, 3, 4, 5)
    blocks.allocate(a, 5, is_whole=True)
    publish(blocks, a, *tokens)
    blocks.slide(a, 5)
    blocks.release(a)
    assert blocks.ledger(WINDOW).num_cached == 5, "what fell out of a window is still cached, until somebody needs room"
    assert blocks.num_cached_prefix(hashes(*tokens)) == 5
    assert blocks.num_cached_prefix(hashes(1, 2)) == 2
    blocks.allocate(b, 7, is_whole=True)  # takes the 10 free ones, then the 4 that were cached first
    assert blocks.ledger(WINDOW).num_cached == 1
    assert blocks.num_cached_prefix(hashes(*tokens)) == 5
    assert blocks.num_cached_prefix(hashes(1, 2, 3, 4)) == 0, "nobody can go on where the window's blocks are gone"
    blocks.release(b)
    found = blocks.allocate(c, 6, hashes(*tokens))
    assert found is not None
    assert found.num_cached == 5
    assert blocks.owned_blocks(c, WINDOW)[:4] == [None] * 4
    assert None not in blocks.owned_blocks(c, WINDOW)[4:]
    blocks.check_integrity()


def test_a_lease_has_no_blocks_in_front_of_what_its_sequence_sees() -> None:
    blocks, lease, a = two_groups(), Owner(OwnerKind.LEASE, "1"), sequence("a")
    given = blocks.allocate(lease, 7, num_computed_tokens=6)
    assert given is not None
    assert blocks.owned_blocks(lease, WINDOW)[:5] == [None] * 5
    assert (blocks.ledger(FULL).num_leased, blocks.ledger(WINDOW).num_leased) == (7, 2)
    publish(blocks, lease, 1, 2, 3, 4, 5, 6)
    blocks.hand_on(lease, a)
    assert blocks.owned_blocks(a, WINDOW)[5:] == given.block_tables[WINDOW][5:]
    blocks.release(a)
    assert blocks.num_cached_prefix(hashes(1, 2, 3, 4, 5, 6)) == 6
    assert blocks.num_cached_prefix(hashes(1, 2, 3, 4)) == 0
    blocks.check_integrity()


def test_who_shares_what_it_gives_back_gets_its_next_block_when_the_other_lets_go() -> None:
    blocks, a, b = two_groups(13), sequence("a"), sequence("b")
    blocks.allocate(a, 5)
    publish(blocks, a, 1, 2)
    assert blocks.allocate(b, 5, hashes(1, 2)) is not None
    assert blocks.num_allocatable == 0
    assert list(map(len, blocks.slide(a, 2))) == [0, 1]  # for its first block, which b does not see
    assert blocks.slide(a, 3) == [[], []]
    assert blocks.num_cached_prefix(hashes(1, 2)) == 2, "b has what a gave back"
    blocks.check_integrity()
    blocks.release(b)
    assert list(map(len, blocks.slide(a, 3))) == [0, 1]
    blocks.check_integrity()


def test_who_goes_on_from_a_sequence_needs_no_more_than_that() -> None:
    blocks, a, fork, later = two_groups(), sequence("a"), sequence("fork"), sequence("later")
    blocks.allocate(a, 4, is_whole=True)
    blocks.slide(a, 3)
    blocks.fork(a, fork, 3)
    blocks.hand_on(a, later)
    assert blocks.owned_blocks(later, WINDOW)[:2] == blocks.owned_blocks(fork, WINDOW)[:2] == [None, None]
    blocks.check_integrity()
    blocks.slide(later, 5)
    assert blocks.ledger(WINDOW).num_running == 1  # the fork still has its last block


def test_a_model_of_windows_only_has_sequences_of_any_length() -> None:
    blocks, a = BlockManager(4, 1, lambda: 0.0, windows=(2,), max_step_tokens=2), sequence("a")
    blocks.allocate(a, 2)
    for num_computed in range(1, 40):
        blocks.slide(a, num_computed)
        assert blocks.extend(a, num_computed + 1) is not None
        blocks.check_integrity()
        assert blocks.ledger().num_running <= 3
    assert blocks.owners() == {a: 40}


def test_windows_of_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        two_groups(window=0)


ONE = KvSizes(1, 1, 0)


def shape_of(windows: list[int | None]) -> KvGeometry:
    """The geometry of a model with these windows, with one byte for each token and layer."""
    groups = LayerGroups.of(windows, [ONE] * len(windows))
    return KvGeometry(
        groups=tuple(
            KvGroup(
                kind=GroupKind.FULL,
                window=window,
                layers=layers,
                num_kv_heads=1,
                key_size=1,
                value_size=0,
                dtype="uint8",
            )
            for window, layers in zip(groups.windows, groups.layers, strict=True)
        ),
        block_size=16,
    )


@pytest.mark.parametrize(
    ("windows", "at_least"),
    [
        pytest.param(([1024] * 5 + [None]) * 8, 3.5, id="gemma-3-12b"),
        pytest.param((([1024] * 5 + [None]) * 11)[:62], 3.5, id="gemma-3-27b"),
        pytest.param([128, None] * 12, 1.87, id="gpt-oss-20b"),
        pytest.param([None] * 32, 1.0, id="one group"),
    ],
)
def test_a_pool_holds_as_many_more_tokens_as_windows_leave_room_for(windows: list[int | None], at_least: float) -> None:
    """Contexts of 8k tokens in a pool with room for 40 of them without groups."""
    context, memory = 8192, 40 * 8192 * len(windows)
    geometry = shape_of(windows)
    blocks = BlockManager(memory // geometry.physical_nbytes, 16, lambda: 0.0, windows=geometry.windows)
    num_held = 0
    while blocks.allocate(sequence(str(num_held)), 8192 // 16, num_computed_tokens=context - 1) is not None:
        num_held += 1
    blocks.check_integrity()
    ledger = blocks.ledger()
    assert ledger.num_free < context // 16 * len(geometry.groups)
    assert ledger.num_running * geometry.physical_nbytes <= memory
    assert num_held / 40 >= at_least


def test_layers_are_grouped_by_window_into_groups_of_about_one_size() -> None:
    groups = LayerGroups.of([8, 8, None, 8, 8, 8, None, 8], [ONE] * 8)
    assert groups.windows == (None, 8, 8, 8)
    assert groups.layers == ((2, 6), (0, 4), (1, 5), (3, 7))
    assert groups.places[4] == (1, 1)
    assert [len(layers) for layers in LayerGroups.of([None] * 5, [ONE] * 5).layers] == [5]
    assert LayerGroups.of([4, None, 8], [ONE] * 3).windows == (None, 4, 8)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (None, 8, 8, 40), (8,), (64, None)])
@pytest.mark.parametrize("num_blocks", [3, 10, 40])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(windows: tuple[int | None, ...], num_blocks: int) -> None:
    group = KvGroup(kind=GroupKind.FULL, layers=(0,), num_kv_heads=1, key_size=1, value_size=0, dtype="uint8")
    geometry = KvGeometry(
        groups=tuple(
            KvGroup(**{**{f: getattr(group, f) for f in group.__struct_fields__}, "window": one}) for one in windows
        ),
        block_size=4,
    )
    longest = geometry.max_tokens(num_blocks, 8)
    blocks = BlockManager(num_blocks * len(windows), 4, lambda: 0.0, windows=windows, max_step_tokens=8)
    if longest is None:
        assert None not in windows
        assert blocks.num_physical_for(10**6) <= num_blocks * len(windows)
        return
    assert blocks.allocate(sequence("longest"), longest // 4) is not None
    blocks.release(sequence("longest"))
    assert blocks.allocate(sequence("longer"), longest // 4 + 1) is None


class AtRandom:
    """Sequences computed in steps, with blocks of one token, beside a model of the blocks that each needs."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.windows = (None, chance.choice((1, 2, 3)), None, chance.choice((2, 5, Chunk(2), Chunk(5))))
        self.blocks = BlockManager(40, 1, lambda: 0.0, windows=self.windows, max_step_tokens=2)
        self.computed: dict[Owner, int] = {}
        self.tables: dict[Owner, Tables] = {}
        self.chains: dict[Owner, list[bytes]] = {}
        self.count = 0

    def new_owner(self) -> Owner:
        self.count += 1
        return sequence(str(self.count))

    def pick(self) -> Owner:
        return self.chance.choice(list(self.computed))

    def allocate(self) -> None:
        owner, chain = self.new_owner(), hashes(*self.chance.choices((0, 1), k=self.chance.randint(1, 7)))
        given = self.blocks.allocate(owner, len(chain) + 1, chain)
        if given is not None:
            self.computed[owner], self.tables[owner], self.chains[owner] = given.num_cached, given.block_tables, chain

    def compute(self) -> None:
        owner = self.pick()
        room = min(map(len, self.tables[owner])) - self.computed[owner]
        num_computed = self.computed[owner] + min(room, self.chance.randint(1, 2))
        chain = self.chains[owner]
        for index in range(self.computed[owner], min(num_computed, len(chain))):
            self.blocks.publish(owner, index, chain[index])
        self.computed[owner] = num_computed
        self._append(owner, self.blocks.slide(owner, num_computed))

    def extend(self) -> None:
        owner = self.pick()
        fresh = self.blocks.extend(owner, self.computed[owner] + 1)
        if fresh is not None:
            self._append(owner, fresh)

    def _append(self, owner: Owner, fresh: Tables) -> None:
        for table, block_ids in zip(self.tables[owner], fresh, strict=True):
            table.extend(block_ids)

    def release(self) -> None:
        owner = self.pick()
        self.blocks.release(owner)
        del self.computed[owner], self.tables[owner], self.chains[owner]

    def hand_on(self) -> None:
        owner, later = self.pick(), self.new_owner()
        self.blocks.hand_on(owner, later)
        for books in (self.computed, self.tables, self.chains):
            books[later] = books.pop(owner)  # type: ignore[attr-defined, index]

    def agrees(self) -> None:
        self.blocks.check_integrity()
        for owner, tables in self.tables.items():
            for group, (window, table) in enumerate(zip(self.windows, tables, strict=True)):
                computed = self.computed[owner]
                if isinstance(window, Chunk):
                    seen = computed // window.size * window.size
                else:
                    seen = 0 if window is None else max(0, computed + 1 - window)
                owned = self.blocks.owned_blocks(owner, group)
                assert owned == [None] * min(seen, len(owned)) + table[seen:]
        # Owners of the same block must have the same hash there, so that they computed the same tokens.
        for group in range(len(self.windows)):
            owners_of: dict[int | None, set[bytes | None]] = {}
            for owner in self.tables:
                for index, block_id in enumerate(self.blocks.owned_blocks(owner, group)):
                    chain = self.chains[owner]
                    owners_of.setdefault(block_id, set()).add(chain[index] if index < len(chain) else None)
            owners_of.pop(None, None)
            assert all(len(contents) == 1 for contents in owners_of.values())


@pytest.mark.parametrize("seed", range(20))
def test_each_group_holds_what_somebody_sees_or_is_cached(seed: int) -> None:
    books = AtRandom(random.Random(seed))
    acts = (books.compute, books.compute, books.compute, books.extend, books.release, books.hand_on)
    for _ in range(400):
        if not books.computed or books.chance.random() < 0.3:
            books.allocate()
        else:
            books.chance.choice(acts)()
        books.agrees()
