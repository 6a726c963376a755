"""Keys and values of unequal size, in blocks that other groups lay out otherwise and that were full of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.attention.decode import paged_decode_attention
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.prefill import paged_prefill_attention
from kvrelay.kernels.attention.reference import paged_decode_attention_reference, paged_prefill_attention_reference
from kvrelay.kernels.checks import PagedKv, PoolGeometry

Randn = Callable[..., torch.Tensor]
HEADS, BLOCK_SIZE, TAIL = 2, 16, 96  # TAIL: elements of a block that this group leaves unused


def views(num_blocks: int, sizes: tuple[int, int], device: str, dtype: torch.dtype = torch.float32) -> PagedKv:
    """Views of two layers, full of NaN."""
    of_layer = HEADS * BLOCK_SIZE * sum(sizes)
    pool = torch.full((num_blocks, 2 * of_layer + TAIL), math.nan, dtype=dtype, device=device)

    def view(size: int, start: int) -> torch.Tensor:
        strides = (pool.stride(0), of_layer, BLOCK_SIZE * size, size, 1)
        return pool.as_strided((num_blocks, 2, HEADS, BLOCK_SIZE, size), strides, start)

    return PagedKv(view(sizes[0], 0), view(sizes[1], HEADS * BLOCK_SIZE * sizes[0]))


def wide(kv: PagedKv) -> PagedKv:
    """A float64 copy for the reference."""
    made = views(len(kv.keys), (kv.keys.shape[4], kv.values.shape[4]), str(kv.keys.device), torch.float64)
    made.keys.copy_(kv.keys)
    made.values.copy_(kv.values)
    return made


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [((48, 32), {}), ((48, 32), {"sliding_window": 20}), ((32, 48), {"chunk_size": 16}), ((192, 128), {})],
    ids=str,
)
def test_single_tokens_and_prompts(sizes: tuple[int, int], seen: dict[str, int], device: str, randn: Randn) -> None:
    seq_lens, query_lens = [37, 5, 64], [20, 5, 1]
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(0)).to(device, torch.int32).view(3, 4)
    kv = views(12, sizes, device)
    for row, seq_len in enumerate(seq_lens):
        first_query = seq_len - query_lens[row]
        first = max(0, first_query + 1 - seen.get("sliding_window", seq_len))
        if "chunk_size" in seen:
            first = first_query // seen["chunk_size"] * seen["chunk_size"]
        for position in range(first, seq_len):
            block, offset = int(tables[row, position // BLOCK_SIZE]), position % BLOCK_SIZE
            for view in (kv.keys, kv.values):
                view[block, 1, :, offset] = randn(HEADS, view.shape[4], dtype=torch.float32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
    q = randn(sum(query_lens), 3 * HEADS, sizes[0], dtype=torch.float32)
    out = torch.full((len(q), 3 * HEADS, sizes[1]), math.nan, device=device)
    # The reference reads the whole context, so unseen slots must be zeros instead of NaN.
    there = wide(kv)
    there.keys.nan_to_num_(0.0)
    there.values.nan_to_num_(0.0)
    options = {"scale": 0.2, **seen}
    paged_prefill_attention(q, kv, 1, tables, starts, lens, **options, max_query_len=20, out=out)
    expected = torch.empty(out.shape, dtype=torch.float64, device=device)
    paged_prefill_attention_reference(
        q.double(), there, 1, tables, starts, lens, **options, max_query_len=20, out=expected
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)

    last = q[starts[1:].long() - 1].contiguous()
    single = torch.full((3, 3 * HEADS, sizes[1]), math.nan, device=device)
    workspace = DecodeWorkspace.allocate(3, 3 * HEADS, sizes[1], 4, device)
    paged_decode_attention(last, kv, 1, tables, lens, **options, workspace=workspace, out=single)
    expected = torch.empty(single.shape, dtype=torch.float64, device=device)
    paged_decode_attention_reference(last.double(), there, 1, tables, lens, **options, out=expected)
    torch.testing.assert_close(single.double(), expected, atol=2e-5, rtol=0)


def test_views_of_something_else_are_refused(device: str) -> None:
    kv = views(2, (32, 16), device)
    with pytest.raises(ValueError, match="values have strides"):
        PoolGeometry.of(PagedKv(kv.keys, kv.values.clone(memory_format=torch.contiguous_format)), 0)
    with pytest.raises(ValueError, match="layer is 2"):
        PoolGeometry.of(kv, 2)
