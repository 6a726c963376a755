"""Attention over latents against a float64 reference: splits, chunks of prompts, head tiles, padding rows, sizes of models."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.latent import (
    latent_attention_reference,
    latent_decode_attention,
    latent_prefill_attention,
)
from kvrelay.kernels.attention.splits import MIN_KEYS_PER_SPLIT
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def check(device: str, randn: Randn, assert_close: AssertClose) -> Callable[..., None]:
    """Compare with float64. ``query_lens`` None means decoding, else each sequence's last ``query_lens`` tokens are
    queries."""

    def run(
        seq_lens: list[int],
        query_lens: list[int] | None = None,
        *,
        num_q_heads: int = 5,
        rank: int = 32,
        rope: int = 8,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        max_splits: int = 4,
    ) -> None:
        size = rank + rope
        needed = [-(-length // block_size) for length in seq_lens]
        pool = torch.full((sum(needed) + 3, 2, 1, 1, block_size, size), math.nan, dtype=dtype, device=device)
        free = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1)).tolist()
        tables = torch.full((len(seq_lens), max(needed) + 1), 2**30, dtype=torch.int32, device=device)
        for row, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
            for index in range(count):
                block = tables[row, index] = free.pop()
                filled = min(block_size, length - index * block_size)
                pool[int(block), 1, 0, 0, :filled] = randn(filled, size, dtype=dtype)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        counts = [min(1, length) for length in seq_lens] if query_lens is None else query_lens
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
        num_tokens = len(seq_lens) if query_lens is None else sum(query_lens)
        q = randn(num_tokens, num_q_heads + 2, size, dtype=dtype)[:, 1:-1]
        out = torch.full((num_tokens, num_q_heads, rank), math.nan, dtype=dtype, device=device)
        expected = torch.zeros(out.shape, dtype=torch.float64, device=device)
        known = {"rank": rank, "scale": size**-0.5}
        if query_lens is None:
            workspace = DecodeWorkspace.allocate(len(seq_lens) + 2, num_q_heads, rank, max_splits, device)
            workspace.partial_out.fill_(math.nan)
            workspace.partial_lse.fill_(math.nan)
            latent_decode_attention(q, pool, 1, tables, lens, workspace=workspace, out=out, **known)
            rows = lens.nonzero()[:, 0]
            of_rows = expected[rows]
            ones = torch.arange(len(rows) + 1, dtype=torch.int32)
            latent_attention_reference(
                *(q[rows].double(), pool.double(), 1, tables[rows], ones, lens[rows]),
                max_query_len=1,
                out=of_rows,
                **known,
            )
            expected[rows] = of_rows
        else:
            known |= {"max_query_len": max(query_lens)}
            latent_prefill_attention(q, pool, 1, tables, starts, lens, out=out, **known)
            latent_attention_reference(q.double(), pool.double(), 1, tables, starts, lens, out=expected, **known)
        assert_close(out, expected)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_lengths_around_the_split_boundary(check: Callable[..., None], dtype: torch.dtype) -> None:
    n = MIN_KEYS_PER_SPLIT
    check([1, n - 1, n, n + 1, 2 * n + 37], dtype=dtype)


def test_padding_rows_become_zero(check: Callable[..., None]) -> None:
    check([0, 19, 0])


@pytest.mark.parametrize(("num_q_heads", "rank", "rope"), [(1, 16, 8), (16, 24, 16), (33, 64, 32), (2, 512, 64)])
def test_heads_and_sizes(check: Callable[..., None], num_q_heads: int, rank: int, rope: int) -> None:
    check([19, 70], num_q_heads=num_q_heads, rank=rank, rope=rope)
    check([19, 37], [3, 5], num_q_heads=num_q_heads, rank=rank, rope=rope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_prompts_behind_a_context(check: Callable[..., None], dtype: torch.dtype) -> None:
    check([40, 7, 33, 5], [13, 7, 1, 0], dtype=dtype)


@pytest.mark.parametrize("block_size", [8, 64])
def test_block_sizes(check: Callable[..., None], block_size: int) -> None:
    check([70, 100], block_size=block_size)
    check([70, 20], [9, 20], block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pool": torch.zeros(2, 2, 2, 1, 16, 40)}, r"pool has shape \(2, 2, 2, 1, 16, 40\)"),
        ({"rank": 40}, "rank is 40, expected less than the latents' 40"),
        ({"q": torch.zeros(1, 5, 48)}, "q has size 48, expected at most that of the pool's rows, 40"),
        ({"layer": 2}, "layer is 2, expected 0 <= layer < 2"),
        ({"out": torch.zeros(1, 5, 40)}, r"out has shape \(1, 5, 40\), expected \[1, 5, 32\]"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], reason: str) -> None:
    given = {
        "q": torch.zeros(1, 5, 40),
        "pool": torch.zeros(2, 2, 1, 1, 16, 40),
        "layer": 1,
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "rank": 32,
        "scale": 1.0,
        "workspace": DecodeWorkspace.allocate(1, 5, 32, 4, "cpu"),
        "out": torch.zeros(1, 5, 32),
    }
    with pytest.raises(ValueError, match=reason):
        latent_decode_attention(**{**given, **changes})  # type: ignore[arg-type]
