"""The parts of a block that each rank owns: between any stages and ranks every byte arrives exactly once, at its
place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.config.cut import Cut, cuts_of
from kvrelay.engine.kv.division import Division
from kvrelay.engine.kv.fragments import Fragment, given, taken
from kvrelay.engine.kv.gathered import GatheredStore, HostPart

NUM_BLOCKS = 3
SIDES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 5)))  # ranks of a stage, and stages
GROUPS = {  # of five layers
    "one": [(GroupKind.FULL, (0, 1, 2, 3, 4))],
    "windows": [(GroupKind.FULL, (0, 3)), (GroupKind.WINDOW, (1, 4)), (GroupKind.WINDOW, (2,))],
    "latents": [(GroupKind.LATENT, (0, 1, 2, 3, 4))],
}


def geometry(groups: str, num_kv_heads: int, dtype: str = "bfloat16", block_size: int = 4) -> KvGeometry:
    return KvGeometry(
        groups=tuple(
            KvGroup(
                kind=kind, window=9 if kind is GroupKind.WINDOW else None, layers=layers, num_kv_heads=num_kv_heads,
                key_size=6, value_size=0 if kind is GroupKind.LATENT else 6, dtype=dtype,
            )
            for kind, layers in GROUPS[groups]
        ),
        block_size=block_size,
    )  # fmt: skip


def fits(num_kv_heads: int, num_ranks: int) -> bool:
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


def own_nbytes(fragments: list[Fragment]) -> int:
    return sum(one.nbytes for one in fragments)


def group_nbytes(layout: KvGeometry, group: int) -> int:
    return layout.groups[group].token_nbytes * layout.block_size


CASES = [("latents", 1)] + [(groups, heads) for groups in ("one", "windows") for heads in (1, 2, 3, 4, 8, 12)]


@pytest.mark.parametrize(("groups", "num_kv_heads"), CASES)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_every_byte_arrives_exactly_once(groups: str, num_kv_heads: int, dtype: str) -> None:
    """Bytes are numbered. Each sender's rank has the bytes of its layers and heads, as a model would have computed
    them. All senders give the same joined block, so it is enough to try each sender and each receiver once."""
    layout = geometry(groups, num_kv_heads, dtype)
    for group in range(len(layout.groups)):
        numbers = np.arange(group_nbytes(layout, group))
        for side in (cuts_of(*side) for side in SIDES if fits(num_kv_heads, side[0])):
            assert (put_together(layout, side, group, numbers) == numbers).all()
            for cut in side:
                fragments = taken(layout, cut, group)
                own = np.full(own_nbytes(fragments), -1)
                for one in fragments:
                    assert (own[one.own_start : one.own_start + one.nbytes] == -1).all(), "written twice"
                    own[one.own_start : one.own_start + one.nbytes] = numbers[one.start : one.start + one.nbytes]
                assert (own == numbers[owned(layout, cut, group)]).all()


def put_together(layout: KvGeometry, senders: list[Cut], group: int, numbers: np.ndarray) -> np.ndarray:
    times_given = np.zeros(len(numbers), dtype=int)
    whole = np.full(len(numbers), -1)
    for cut in senders:
        held = numbers[owned(layout, cut, group)]
        for one in given(layout, cut, group):
            times_given[one.start : one.start + one.nbytes] += 1
            whole[one.start : one.start + one.nbytes] = held[one.own_start : one.own_start + one.nbytes]
    assert (times_given == 1).all()
    return whole


def owned(layout: KvGeometry, cut: Cut, group: int) -> np.ndarray:
    """The bytes of a group's block that a rank has, in its order, from the shape of the pool instead of the
    fragments."""
    of = layout.groups[group]
    shape = (len(of.layers), 2 if of.value_size else 1, of.num_kv_heads, -1)
    places = [place for place, layer in enumerate(of.layers) if layer in cut.layers(5)]
    heads = list(cut.heads(of.num_kv_heads))
    return np.arange(group_nbytes(layout, group)).reshape(shape)[places][:, :, heads].reshape(-1)


def test_ranks_with_all_heads_take_all_and_the_first_of_each_stage_gives() -> None:
    layout = geometry("windows", 4)
    whole = Division(frozenset(range(len(layout.groups))))
    for group, one in enumerate(layout.groups):
        for cut in cuts_of(2, 2):
            fragments = taken(layout, cut, group, whole)
            num_layers = len(set(one.layers) & set(cut.layers(5)))
            assert own_nbytes(fragments) == group_nbytes(layout, group) // len(one.layers) * num_layers
            assert given(layout, cut, group, whole) == ([] if cut.rank else fragments)


@pytest.mark.parametrize(
    ("sender", "receiver"), list(itertools.product(((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 5)), repeat=2))
)
@pytest.mark.parametrize("groups", ["one", "windows"])
def test_a_block_goes_from_pool_to_pool(groups: str, sender: tuple[int, int], receiver: tuple[int, int]) -> None:
    layout = geometry(groups, 12)
    random = np.random.default_rng(1)
    for group in range(len(layout.groups)):
        nbytes = group_nbytes(layout, group)
        blocks = random.integers(0, 256, (NUM_BLOCKS, nbytes), dtype=np.uint8)
        source = store(layout, sender, group, blocks)
        target = store(layout, receiver, group, np.zeros_like(blocks))
        for block_id in range(NUM_BLOCKS):
            view = target.open_write(2 - block_id, group)
            view[:] = source.open_read(block_id, group).wait(None, 1.0)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="open for writing already"):
                target.open_write(2 - block_id, group)
            target.close_write(2 - block_id)
            assert (target.gather(2 - block_id, group)[:nbytes] == blocks[block_id]).all()
        with pytest.raises(ValueError, match="block 3 of a pool of 3"):
            target.open_write(3, group)


def store(layout: KvGeometry, side: tuple[int, int], group: int, blocks: np.ndarray) -> GatheredStore:
    parts = [blocks[:, owned(layout, cut, group)].copy() for cut in cuts_of(*side)]
    return GatheredStore(layout, NUM_BLOCKS, [HostPart(part) for part in parts], side[1])
