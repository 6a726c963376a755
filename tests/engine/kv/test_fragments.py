"""What of a block is whose: between any ranks every byte arrives exactly once, where it belongs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.kv.fragments import Fragment, given, taken
from kvrelay.engine.kv.gathered import GatheredStore, HostPart

NUM_BLOCKS = 3


def geometry(num_layers: int, num_kv_heads: int, dtype: str = "bfloat16", block_size: int = 4) -> KvGeometry:
    group = KvGroup(
        kind=GroupKind.FULL, layers=tuple(range(num_layers)), num_kv_heads=num_kv_heads, key_size=6, value_size=6, dtype=dtype
    )  # fmt: skip
    return KvGeometry(groups=(group,), block_size=block_size)


def fits(num_kv_heads: int, num_ranks: int) -> bool:
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


def own_nbytes(fragments: list[Fragment]) -> int:
    return sum(one.nbytes for one in fragments)


CASES = [
    (kv_heads, senders, receivers)
    for kv_heads, senders, receivers in itertools.product((1, 2, 3, 4, 8, 12), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6))
    if fits(kv_heads, senders) and fits(kv_heads, receivers)
]


@pytest.mark.parametrize(("num_kv_heads", "num_senders", "num_receivers"), CASES)
@pytest.mark.parametrize(("num_layers", "dtype"), [(1, "float8_e4m3fn"), (3, "bfloat16")])
def test_every_byte_arrives_exactly_once(
    num_kv_heads: int, num_senders: int, num_receivers: int, num_layers: int, dtype: str
) -> None:
    """Bytes are numbered; each sender's rank has its heads of them, as a model would have computed them."""
    layout = geometry(num_layers, num_kv_heads, dtype)
    numbers = np.arange(layout.block_nbytes)
    senders = [Cut(rank, num_senders) for rank in range(num_senders)]
    times_given = np.zeros(layout.block_nbytes, dtype=int)
    whole = np.full(layout.block_nbytes, -1)
    for cut in senders:
        held = numbers[owned(layout, cut)]
        for one in given(layout, cut, 0):
            times_given[one.start : one.start + one.nbytes] += 1
            whole[one.start : one.start + one.nbytes] = held[one.own_start : one.own_start + one.nbytes]
    assert (times_given == 1).all()
    for cut in (Cut(rank, num_receivers) for rank in range(num_receivers)):
        fragments = taken(layout, cut, 0)
        own = np.full(own_nbytes(fragments), -1)
        for one in fragments:
            assert (own[one.own_start : one.own_start + one.nbytes] == -1).all(), "written twice"
            own[one.own_start : one.own_start + one.nbytes] = whole[one.start : one.start + one.nbytes]
        assert (own == numbers[owned(layout, cut)]).all()


def owned(layout: KvGeometry, cut: Cut) -> np.ndarray:
    """Which bytes of the model's block are a rank's, in its order: by the shape of the pool, not by fragments."""
    (group,) = layout.groups
    shape = (len(group.layers), 2, group.num_kv_heads, -1)
    heads = list(cut.heads(group.num_kv_heads))
    return np.arange(layout.block_nbytes).reshape(shape)[:, :, heads].reshape(-1)


@pytest.mark.parametrize(("num_senders", "num_receivers"), list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_a_block_goes_from_pool_to_pool(num_senders: int, num_receivers: int) -> None:
    layout = geometry(2, 12)
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (NUM_BLOCKS, layout.block_nbytes), dtype=np.uint8)
    source = store(layout, num_senders, blocks)
    target = store(layout, num_receivers, np.zeros_like(blocks))
    for block_id in range(NUM_BLOCKS):
        view = target.open_write(2 - block_id, 0)
        view[:] = source.open_read(block_id, 0).wait(None, 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="open for writing already"):
            target.open_write(2 - block_id, 0)
        target.close_write(2 - block_id)
        assert (target.gather(2 - block_id, 0) == blocks[block_id]).all()
    with pytest.raises(ValueError, match="block 3 of a pool of 3"):
        target.open_write(3, 0)


def store(layout: KvGeometry, num_ranks: int, blocks: np.ndarray) -> GatheredStore:
    parts = [blocks[:, owned(layout, Cut(rank, num_ranks))].copy() for rank in range(num_ranks)]
    return GatheredStore(layout, NUM_BLOCKS, [HostPart(part) for part in parts])
