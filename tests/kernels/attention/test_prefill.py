"""Prefill attention against a float64 reference: ragged chunks, cached prefixes, windows, head groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels.attention.prefill import paged_prefill_attention
from kvrelay.kernels.attention.reference import paged_prefill_attention_reference
from tests.kernels.conftest import DTYPES
from tests.last_seen import random_last_seen

Randn = Callable[..., torch.Tensor]
PagedContext = Callable[..., tuple[torch.Tensor, torch.Tensor]]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def check(device: str, randn: Randn, paged_context: PagedContext, assert_close: AssertClose) -> Callable[..., None]:
    def run(
        query_lens: list[int],
        seq_lens: list[int],
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        fp8: bool = False,
        softcap: float | None = None,
        has_sinks: bool = False,
        has_images: bool = False,
    ) -> None:
        num_q_heads, num_kv_heads = heads
        pool_dtype = torch.float8_e4m3fn if fp8 else dtype
        pool, tables = paged_context(seq_lens, num_kv_heads, head_dim, block_size, pool_dtype)
        # Scales differ by layer, kind and head, so that using a wrong one fails.
        scales = torch.linspace(0.3, 1.2, 4 * num_kv_heads).view(2, 2, -1).to(device) if fp8 else None
        num_tokens = sum(query_lens)
        # Two rows more than tokens: the kernel must not write these rows of `out`.
        padded_q = randn(num_tokens + 2, num_q_heads + 1, head_dim, dtype=dtype)[:, :num_q_heads]
        q = padded_q[:num_tokens]
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        out = torch.full((num_tokens + 2, num_q_heads, head_dim), math.nan, dtype=dtype, device=device)
        expected = torch.full(q.shape, math.nan, dtype=torch.float64, device=device)
        # A generous bound, as the grid may be larger than the batch needs.
        options = {"scale": head_dim**-0.5, "sliding_window": sliding_window, "max_query_len": max(query_lens) + 40}
        sinks = torch.linspace(-2, 3, num_q_heads).to(dtype).to(device) if has_sinks else None
        options |= {"chunk_size": chunk_size, "kv_scales": scales, "softcap": softcap, "sinks": sinks}
        seen = torch.from_numpy(random_last_seen(query_lens, seq_lens)).int().to(device) if has_images else None
        padded_seen = None if seen is None else F.pad(seen, (0, 2), value=2**30)
        paged_prefill_attention(padded_q, pool, 1, tables, starts, lens, **options, last_seen=padded_seen, out=out)
        wide = pool if fp8 else pool.double()
        options |= {"last_seen": seen}
        paged_prefill_attention_reference(q.double(), wide, 1, tables, starts, lens, **options, out=expected)
        # Over an fp8 pool the weights are rounded to fp16, so fp16's tolerance applies.
        result = out[:num_tokens]
        assert_close(result.half() if fp8 and dtype == torch.float32 else result, expected)
        assert out[num_tokens:].isnan().all()

    return run


def test_reference_is_causal_attention(device: str, randn: Randn, paged_context: PagedContext) -> None:
    pool, tables = paged_context([21], 2, 32, 8, torch.float32)
    q = randn(21, 4, 32)
    out = torch.empty_like(q)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 21], [21]))
    paged_prefill_attention_reference(
        q, pool, 1, tables, starts, lens, scale=0.2, sliding_window=None, max_query_len=21, out=out
    )
    keys, values = pool[tables[0, :3].long(), 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :21]
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_reference_lets_images_see_themselves(device: str, randn: Randn, paged_context: PagedContext) -> None:
    pool, tables = paged_context([21], 2, 32, 8, torch.float32)
    q = randn(12, 4, 32)
    out = torch.empty_like(q)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 12], [21]))
    seen = torch.tensor([9, 14, 14, 14, 14, 14, 15, 16, 17, 20, 20, 20], dtype=torch.int32, device=device)
    options = {"scale": 0.2, "sliding_window": 4, "max_query_len": 12, "last_seen": seen}
    paged_prefill_attention_reference(q, pool, 1, tables, starts, lens, **options, out=out)
    query, key = torch.arange(9, 21, device=device)[:, None], torch.arange(21, device=device)[None]
    is_same_image = (query >= 10) & (query <= 14) & (key >= 10) & (key <= 14) | (query >= 18) & (key >= 18)
    mask = (query - key < 4) & ((key <= query) | is_same_image)
    keys, values = pool[tables[0, :3].long(), 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :21]
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "dtype"),
    [
        ((9, 3), 64, None, torch.bfloat16),
        ((9, 3), 64, 100, torch.bfloat16),
        ((4, 2), 128, 30, torch.bfloat16),
        pytest.param((3, 1), 64, 30, torch.float32, marks=pytest.mark.full),
        pytest.param((3, 1), 64, None, torch.float16, marks=pytest.mark.full),
    ],
)
def test_images_see_themselves(
    check: Callable[..., None], heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Images longer than tiles and than the window, over prefixes, beside single tokens."""
    query_lens, seq_lens = [150, 45, 20, 0, 1, 16], [150, 45, 133, 30, 70, 64]
    check(query_lens, seq_lens, heads=heads, head_dim=head_dim, sliding_window=window, dtype=dtype, has_images=True)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"has_sinks": True, "sliding_window": 20},
        {"fp8": True},
        {"heads": (2, 1), "head_dim": 256},
        pytest.param({"heads": (16, 2), "head_dim": 512}, marks=pytest.mark.full),
        {"block_size": 64},
        {"chunk_size": 20},
    ],
    ids=str,
)
def test_images_with_other_options(check: Callable[..., None], options: dict[str, Any]) -> None:
    check([70, 33, 5], [70, 100, 75], **{"heads": (3, 1), "head_dim": 32, **options}, has_images=True)


@pytest.mark.parametrize("window", [None, 30])
def test_seeing_up_to_the_own_position_changes_no_bit(
    device: str, randn: Randn, paged_context: PagedContext, window: int | None
) -> None:
    pool, tables = paged_context([150, 100], 2, 32, 16, torch.bfloat16)
    q = randn(170, 6, 32, dtype=torch.bfloat16)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 90, 170], [150, 100]))
    own = torch.cat((torch.arange(60, 150), torch.arange(20, 100))).int().to(device)
    results = []
    for last_seen in (None, own):
        out = torch.empty_like(q)
        options = {"scale": 0.2, "sliding_window": window, "max_query_len": 90, "last_seen": last_seen}
        paged_prefill_attention(q, pool, 1, tables, starts, lens, **options, out=out)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_chunks_and_cached_prefixes(check: Callable[..., None], dtype: torch.dtype) -> None:
    """A whole prompt, a chunk after a prefix, an empty query, one token, and a full tile."""
    check([45, 20, 0, 1, 16], [45, 133, 30, 70, 64], dtype=dtype)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 16), ((7, 1), 48), ((16, 1), 80), ((4, 2), 128), ((2, 1), 256)]
)
def test_head_groups_and_head_dims(check: Callable[..., None], heads: tuple[int, int], head_dim: int) -> None:
    check([19, 5], [19, 75], heads=heads, head_dim=head_dim)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [((16, 2), 512, torch.bfloat16), ((2, 1), 320, torch.float32)])
def test_large_heads(check: Callable[..., None], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """The sizes of Gemma 4's global layers."""
    check([7, 2], [7, 50], heads=heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(check: Callable[..., None], block_size: int) -> None:
    check([70, 3], [150, 65], block_size=block_size, heads=(2, 1), head_dim=32)


@pytest.mark.parametrize("sliding_window", [1, 7, 64, 100, 1000])
def test_sliding_windows(check: Callable[..., None], sliding_window: int) -> None:
    check([90, 33], [90, 211], sliding_window=sliding_window, heads=(3, 1), head_dim=32)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 1000])
def test_chunks(check: Callable[..., None], chunk_size: int) -> None:
    check([90, 33, 1], [90, 211, 65], chunk_size=chunk_size, heads=(3, 1), head_dim=32)


@pytest.mark.parametrize(
    ("dtype", "softcap", "has_sinks", "window"),
    [
        (torch.bfloat16, 1.5, False, None),
        (torch.bfloat16, None, True, 30),
        (torch.bfloat16, 1.5, True, None),
        pytest.param(torch.float32, 1.5, True, 30, marks=pytest.mark.full),
        pytest.param(torch.float16, 1.5, True, None, marks=pytest.mark.full),
    ],
)
def test_softcaps_and_sinks(
    check: Callable[..., None], dtype: torch.dtype, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    check(
        [45, 5, 1], [45, 75, 90], heads=(6, 2), head_dim=32, dtype=dtype, softcap=softcap, has_sinks=has_sinks,
        sliding_window=window,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "window"),
    [
        (torch.bfloat16, (9, 3), 64, None),
        (torch.bfloat16, (2, 1), 48, 30),
        pytest.param(torch.float32, (2, 1), 48, 30, marks=pytest.mark.full),
        pytest.param(torch.float16, (2, 1), 48, None, marks=pytest.mark.full),
    ],
)
def test_fp8_pools(
    check: Callable[..., None], dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    check([19, 5], [19, 75], heads=heads, head_dim=head_dim, dtype=dtype, fp8=True, sliding_window=window)


def test_offsets_beyond_31_bits(device: str, randn: Randn, assert_close: AssertClose) -> None:
    pool = torch.empty((2**20 + 2, 1, 2, 1, 16, 64), dtype=torch.bfloat16, device=device)
    table = torch.tensor([[2**20 + 1, 3]], dtype=torch.int32, device=device)
    small = randn(2, 1, 2, 1, 16, 64, dtype=torch.bfloat16)
    pool[table[0].long()] = small
    q = randn(20, 1, 64, dtype=torch.bfloat16)
    out, expected = torch.empty_like(q), torch.empty(q.shape, dtype=torch.float64, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 20], [20]))
    options = {"scale": 0.125, "sliding_window": None, "max_query_len": 20}
    paged_prefill_attention(q, pool, 0, table, starts, lens, **options, out=out)
    near = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    paged_prefill_attention_reference(q.double(), small.double(), 0, near, starts, lens, **options, out=expected)
    assert_close(out, expected)


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    pool, q = randn(2, 1, 2, 1, 16, 64), randn(3, 2, 64)
    table, starts, lens = (torch.zeros(s, dtype=torch.int32, device=device) for s in ((1, 2), (2,), (1,)))

    def call(**changes: object) -> None:
        arguments = {"q": q, "pool": pool, "layer": 0, "block_tables": table, "query_start_loc": starts}
        arguments |= {"seq_lens": lens, "scale": 1.0, "sliding_window": None, "max_query_len": 3, "out": q.clone()}
        paged_prefill_attention(**{**arguments, **changes})

    for changes, message in (
        ({"q": q.half()}, "q has dtype torch.float16, expected torch.float32"),
        ({"out": q[:2]}, r"out has shape \(2, 2, 64\)"),
        ({"block_tables": table.long()}, "block_tables has dtype"),
        ({"query_start_loc": starts[:1]}, "query_start_loc has shape"),
        ({"seq_lens": lens.long()}, "seq_lens has dtype"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"last_seen": lens.new_zeros(2)}, "last_seen has shape"),
        ({"last_seen": lens.new_zeros(3).long()}, "last_seen has dtype"),
        ({"max_query_len": -1}, "max_query_len is -1"),
        ({"layer": 1}, "layer is 1"),
        ({"pool": pool.to(torch.float8_e4m3fn)}, "kv_scales is None for a pool of torch.float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
