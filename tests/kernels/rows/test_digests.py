"""Digests of a block's stretches against xxhash's."""

from __future__ import annotations

import pytest
import torch

from kvrelay.common.block_digests import STRETCH_NBYTES, digests_of, num_stretches
from kvrelay.kernels.rows.digests import block_digests, is_digestible

ROW = 1024
# Less than a row, a row, ends of all kinds in the last row, ends of a group of rows, and of one and of more stretches.
SIZES = [248, 256, 512, ROW - 8, ROW, ROW + 8, ROW + 64, ROW + 72, 8 * ROW, 8 * ROW + 8, 9 * ROW + 200]
LARGE = [STRETCH_NBYTES - 8, STRETCH_NBYTES, STRETCH_NBYTES + 8, 2 * STRETCH_NBYTES - 8, 3 * STRETCH_NBYTES + 5 * ROW]


@pytest.mark.parametrize("nbytes", [*SIZES, *LARGE])
@pytest.mark.parametrize(("spare", "block_ids"), [(0, [1]), (40, [2, 0, 2])], ids=["one", "three"])
def test_the_digests_are_those_of_the_host(device: str, nbytes: int, spare: int, block_ids: list[int]) -> None:
    """Blocks come in any order, and may have unused bytes at their ends. Numbers and digests may be in memory of the host."""
    generator = torch.Generator().manual_seed(nbytes)
    blocks = torch.randint(0, 256, (3, nbytes + spare), dtype=torch.uint8, generator=generator)
    on_host = torch.zeros(len(block_ids) * (1 + num_stretches(nbytes)), dtype=torch.int64)
    if device == "cuda":
        on_host = on_host.pin_memory()
    numbers, digests = on_host[: len(block_ids)], on_host[len(block_ids) :].view(len(block_ids), -1)
    numbers[:] = torch.tensor(block_ids)
    block_digests(blocks.to(device), numbers, nbytes, STRETCH_NBYTES, digests)
    if device == "cuda":
        torch.cuda.synchronize()
    for block_id, its in zip(block_ids, digests.numpy(), strict=True):
        assert its.tobytes() == digests_of(blocks[block_id, :nbytes].numpy().data)


@pytest.mark.parametrize("value", [0, 0xFF])
def test_blocks_of_one_value_have_digests_too(device: str, value: int) -> None:
    """Their products and sums overflow in all lanes."""
    blocks = torch.full((1, 2 * STRETCH_NBYTES), value, dtype=torch.uint8)
    digests = torch.zeros((1, 2), dtype=torch.int64, device=device)
    number = torch.zeros(1, dtype=torch.int64, device=device)
    block_digests(blocks.to(device), number, 2 * STRETCH_NBYTES, STRETCH_NBYTES, digests)
    assert digests.cpu().numpy().tobytes() == digests_of(blocks[0].numpy().data)


@pytest.mark.parametrize("nbytes", [0, 240, 252, 1020, 4096 + 4])
def test_a_size_of_other_algorithms_or_of_parts_of_words_is_refused(nbytes: int) -> None:
    assert not is_digestible(nbytes)
    blocks, number = torch.zeros((1, 8192), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{nbytes} bytes of a block of 8192"):
        block_digests(blocks, number, nbytes, STRETCH_NBYTES, number.view(1, 1))
