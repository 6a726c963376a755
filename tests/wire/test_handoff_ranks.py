"""Hand-offs between workers of one to four ranks and one or two stages, plain and sealed, over TCP and shared memory."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.kv.fragments import own_nbytes
from kvrelay.engine.kv.gathered import GatheredRead, GatheredStore, HostPart

from .lease_bench import BLOCK_NBYTES, BLOCK_SIZE
from .rig import Rig


def geometry_of(num_heads: int) -> KvGeometry:
    size = BLOCK_NBYTES // (2 * BLOCK_SIZE * num_heads * 2)
    group = KvGroup(
        kind=GroupKind.FULL, layers=(0, 1), num_kv_heads=num_heads, key_size=size, value_size=size, dtype="uint8"
    )
    return KvGeometry(groups=(group,), block_size=BLOCK_SIZE)


class RanksStore(GatheredStore):
    """Replaces :class:`tests.wire.lease_bench.CountingStore` by the pools of several ranks."""

    def __init__(self, num_blocks: int, geometry: KvGeometry, num_ranks: int, num_stages: int) -> None:
        assert geometry.physical_nbytes == BLOCK_NBYTES
        sizes = [own_nbytes(geometry, cut) for cut in cuts_of(num_ranks, num_stages)]
        self.parts = [np.zeros((num_blocks, size), dtype=np.uint8) for size in sizes]
        super().__init__(geometry, num_blocks, [HostPart(part) for part in self.parts], num_stages)
        self.reads: Counter[int] = Counter()
        self.writes: Counter[int] = Counter()
        self._groups: dict[int, int] = {}  # by block: the group of its last write

    def block(self, block_id: int) -> Any:
        return _Block(self, block_id, self._groups.get(block_id, 0))

    def open_read(self, block_id: int, group: int) -> GatheredRead:
        self.reads[block_id] += 1
        return super().open_read(block_id, group)

    def close_read(self, block_id: int) -> None:
        self.reads[block_id] -= 1

    def open_write(self, block_id: int, group: int) -> memoryview:
        self.writes[block_id] += 1
        self._groups[block_id] = group
        return super().open_write(block_id, group)

    def close_write(self, block_id: int) -> None:
        super().close_write(block_id)
        self.writes[block_id] -= 1


class _Block:
    """A block of all ranks, with the interface that a rig writes and reads."""

    def __init__(self, store: RanksStore, block_id: int, group: int) -> None:
        self._store = store
        self._block_id = block_id
        self._group = group

    def __setitem__(self, part: slice, content: bytes) -> None:
        self._store.open_write(self._block_id, 0)[part] = content
        self._store.close_write(self._block_id)

    def __bytes__(self) -> bytes:
        return self._store.gather(self._block_id, self._group).tobytes()


class RanksRig(Rig):
    """A rig whose two pools have several ranks each."""

    def __init__(
        self, context: Any, geometry: KvGeometry, ranks: tuple[tuple[int, int], tuple[int, int]], **options: Any
    ) -> None:
        """``ranks``: (ranks of each stage, stages) of the decode side and of the prefill side."""
        self._geometry = geometry
        self._ranks = iter(ranks)
        super().__init__(context, **options)

    def new_store(self, num_blocks: int) -> Any:
        return RanksStore(num_blocks, self._geometry, *next(self._ranks))


@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("ranks", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_any_ranks_hand_over_to_any_others(context: Any, path: str, ranks: tuple[int, int], seals_kv: bool) -> None:
    """There are four K/V heads. With three ranks on a side there is one head, which all ranks hold."""
    assert_hands_over(
        RanksRig(
            context, geometry_of(1 if 3 in ranks else 4), ((ranks[0], 1), (ranks[1], 1)), seals_kv=seals_kv, path=path
        )
    )


@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("ranks", [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((2, 2), (1, 1)), ((2, 2), (4, 1))], ids=str)
def test_any_stages_hand_over_to_any_others(
    context: Any, path: str, ranks: tuple[tuple[int, int], tuple[int, int]], seals_kv: bool
) -> None:
    assert_hands_over(RanksRig(context, geometry_of(4), ranks, seals_kv=seals_kv, path=path))


def assert_hands_over(rig: RanksRig) -> None:
    try:
        rig.assert_holds(rig.hand_over())
        rig.assert_holds(rig.hand_over(num_tokens=7, request_id="again"))
        for store in (rig.store, rig.source):
            assert all(part.any() for part in store.parts)
    finally:
        rig.close()
