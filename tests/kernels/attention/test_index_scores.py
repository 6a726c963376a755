"""An indexer's scores against a float64 reference, and attention over the rows that they pick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.index_scores import highest_rows, index_scores, index_scores_reference
from kvrelay.kernels.attention.latent import latent_decode_attention, latent_prefill_attention
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]
LOWEST = torch.iinfo(torch.int64).min
LATENT, SIZE = 40, 24  # numbers of a row in front of the indexer's key, and of the key


def scores_of(ranks: torch.Tensor) -> torch.Tensor:
    """The fp32 scores in what ``index_scores`` writes."""
    in_order = (ranks >> 32).int()
    return (in_order ^ ((in_order >> 31) & 0x7FFFFFFF)).view(torch.float32)


class Paged:
    """Rows of sequences in a pool that is full of NaN elsewhere."""

    def __init__(self, seq_lens: list[int], block_size: int, dtype: torch.dtype, device: str, randn: Randn) -> None:
        needed = [-(-length // block_size) for length in seq_lens]
        shape = (sum(needed) + 3, 2, 1, 1, block_size, LATENT + SIZE)
        self.pool = torch.full(shape, math.nan, dtype=dtype, device=device)
        free = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = torch.zeros(len(seq_lens), max(needed) + 1, dtype=torch.int32, device=device)
        for seq, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
            for index in range(count):
                block = self.tables[seq, index] = free.pop()
                filled = min(block_size, length - index * block_size)
                self.pool[int(block), 1, 0, 0, :filled] = randn(filled, LATENT + SIZE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seq_lens", "per_seq", "num_heads", "block_size"),
    [([1, 70, 0, 131], 1, 5, 16), ([67], 11, 16, 8), ([40, 130], 3, 64, 64)],
)
def test_scores(
    seq_lens: list[int], per_seq: int, num_heads: int, block_size: int, dtype: torch.dtype, device: str, randn: Randn,
    assert_close: AssertClose,
) -> None:  # fmt: skip
    paged = Paged(seq_lens, block_size, dtype, device, randn)
    num_rows = len(seq_lens) * per_seq
    query = randn(num_rows, num_heads + 1, SIZE, dtype=dtype)[:, 1:]
    weights = randn(num_rows, num_heads, dtype=torch.float32)
    visible = torch.tensor(
        [max(0, length - per_seq + 1 + token) for length in seq_lens for token in range(per_seq)],
        dtype=torch.int32, device=device,
    )  # fmt: skip
    found, expected = (torch.zeros(num_rows, max(seq_lens) + 5, dtype=torch.int64, device=device) for _ in range(2))
    index_scores(query, weights, paged.pool, 1, paged.tables, visible, found)
    index_scores_reference(query.double(), weights, paged.pool.double(), 1, paged.tables, visible, expected)
    hidden = torch.arange(found.shape[1], device=device) >= visible[:, None]
    assert ((found == LOWEST) == hidden).all()
    assert ((expected == LOWEST) == hidden).all()
    assert (~found & 0x7FFFFFFF)[~hidden].equal(hidden.logical_not().nonzero()[:, 1])
    assert_close(scores_of(found)[~hidden], scores_of(expected)[~hidden].double())


def test_of_equal_scores_the_first_positions_are_the_highest(device: str, randn: Randn) -> None:
    paged = Paged([50], 16, torch.float32, device, randn)
    query = torch.zeros(1, 4, SIZE, device=device)
    weights = torch.tensor([[1.0, -1.0, 0.0, -2.0]], device=device)  # some of the sums are -0
    visible = torch.tensor([50], dtype=torch.int32, device=device)
    ranks = torch.zeros(1, 64, dtype=torch.int64, device=device)
    index_scores(query, weights, paged.pool, 1, paged.tables, visible, ranks)
    assert ranks.topk(50).indices.tolist() == [list(range(50))]


@pytest.mark.parametrize("as_prompts", [False, True])
def test_attention_over_the_highest_rows(
    as_prompts: bool, device: str, randn: Randn, assert_close: AssertClose
) -> None:
    """The last sequence sees fewer tokens than are picked."""
    dtype, num_heads, topk, rank, seq_lens = torch.bfloat16, 5, 12, 32, [70, 33, 7]
    paged = Paged(seq_lens, 16, dtype, device, randn)
    visible = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    ranks = torch.zeros(3, 70, dtype=torch.int64, device=device)
    index_scores(
        randn(3, 16, SIZE, dtype=dtype), randn(3, 16, dtype=torch.float32), paged.pool, 1, paged.tables, visible, ranks
    )
    listed = highest_rows(ranks, paged.tables, topk, paged.pool)
    assert listed.dtype == torch.int32
    counts = visible.clamp(max=topk)
    q, out = randn(3, num_heads, LATENT, dtype=dtype), torch.zeros(3, num_heads, rank, dtype=dtype, device=device)
    rows = paged.pool.view(-1, 1, 1, 1, 1, LATENT + SIZE)[16:]  # layer 1
    known: dict[str, Any] = {"rank": rank, "scale": 0.2, "out": out}
    if as_prompts:
        starts = torch.arange(4, dtype=torch.int32, device=device)
        latent_prefill_attention(q, rows, 0, listed, starts, counts, max_query_len=1, **known)
    else:
        workspace = DecodeWorkspace.allocate(4, num_heads, rank, 4, device)
        latent_decode_attention(q, rows, 0, listed, counts, workspace=workspace, **known)
    expected = torch.zeros(out.shape, dtype=torch.float64, device=device)
    for seq, length in enumerate(seq_lens):
        positions = ranks[seq].topk(min(topk, length)).indices
        blocks = paged.tables[seq].long()[positions // 16]
        latents = paged.pool[blocks, 1, 0, 0, positions % 16, :LATENT].double()
        expected[seq] = (q[seq].double() @ latents.T * 0.2).softmax(-1) @ latents[:, :rank]
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": torch.zeros(2, 4)}, r"weights has shape \(2, 4\), expected \[2, 5\]"),
        ({"query": torch.zeros(2, 5, 80)}, "and rows of at least 80"),
        ({"layer": 2}, "layer 2"),
        ({"out": torch.zeros(2, 16)}, "out has dtype torch.float32, expected torch.int64"),
        ({"block_tables": torch.zeros(3, 1, dtype=torch.int32)}, "query has 2 rows, expected a multiple of the 3"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {
        "query": torch.zeros(2, 5, SIZE),
        "weights": torch.zeros(2, 5),
        "pool": torch.zeros(2, 2, 1, 1, 16, LATENT + SIZE),
        "layer": 1,
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "visible": torch.ones(2, dtype=torch.int32),
        "out": torch.zeros(2, 16, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=reason):
        index_scores(**{**given, **changes})
