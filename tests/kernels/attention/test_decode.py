"""Decode attention against a float64 reference: splits, windows, head groups, padding rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.attention import decode
from kvrelay.kernels.attention.decode import paged_decode_attention
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace, splits_for_device
from kvrelay.kernels.attention.reference import paged_decode_attention_reference
from kvrelay.kernels.attention.splits import MIN_KEYS_PER_SPLIT
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]
PagedContext = Callable[..., tuple[torch.Tensor, torch.Tensor]]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def check(
    device: str,
    randn: Randn,
    paged_context: PagedContext,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Compare with the reference, as a small batch and as one whose programs combine their splits themselves."""

    def run(
        seq_lens: list[int],
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        max_splits: int = 4,
        fp8: bool = False,
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        num_q_heads, num_kv_heads = heads
        pool_dtype = torch.float8_e4m3fn if fp8 else dtype
        pool, tables = paged_context(seq_lens, num_kv_heads, head_dim, block_size, pool_dtype)
        # Scales differ by layer, kind and head, so that using a wrong one fails.
        scales = torch.linspace(0.3, 1.2, 4 * num_kv_heads).view(2, 2, -1).to(device) if fp8 else None
        q = randn(len(seq_lens), num_q_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        out = torch.full((len(seq_lens), num_q_heads, head_dim), math.nan, dtype=dtype, device=device)
        expected = torch.full(out.shape, math.nan, dtype=torch.float64, device=device)
        # The workspace has room for more sequences, and NaN in place of an earlier step's results.
        workspace = DecodeWorkspace.allocate(len(seq_lens) + 2, num_q_heads, head_dim, max_splits, device)
        workspace.partial_out.fill_(math.nan)
        workspace.partial_lse.fill_(math.nan)
        sinks = torch.linspace(-2, 3, num_q_heads).to(dtype).to(device) if has_sinks else None
        options = {"scale": head_dim**-0.5, "sliding_window": sliding_window, "kv_scales": scales}
        options |= {"chunk_size": chunk_size, "softcap": softcap, "sinks": sinks}
        wide = pool if fp8 else pool.double()
        paged_decode_attention_reference(q.double(), wide, 1, tables, lens, **options, out=expected)
        for most_of_few in (len(seq_lens), 0):
            monkeypatch.setattr(decode, "_FEW_SEQS", most_of_few)
            out.fill_(math.nan)
            paged_decode_attention(q, pool, 1, tables, lens, **options, workspace=workspace, out=out)
            # Over an fp8 pool the weights are rounded to fp16, so fp16's tolerance applies.
            assert_close(out.half() if fp8 and dtype == torch.float32 else out, expected)
            assert not workspace.arrivals.any(), workspace.arrivals

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_lengths_around_the_split_boundary(check: Callable[..., None], dtype: torch.dtype) -> None:
    n = MIN_KEYS_PER_SPLIT
    check([1, n - 1, n, n + 1, 2 * n + 37], dtype=dtype, heads=(3, 1), head_dim=32)


@pytest.mark.parametrize("max_splits", [1, 2, 3, 12])
def test_more_keys_than_the_splits_hold_at_their_minimum(check: Callable[..., None], max_splits: int) -> None:
    """Splits grow where there are too few of them. Eleven splits take several rounds of the combine kernel."""
    check([2800, 5], heads=(8, 1), head_dim=16, max_splits=max_splits, block_size=64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 16), ((7, 1), 48), ((16, 1), 80), ((4, 2), 128), ((20, 1), 64), ((2, 1), 256)]
)
def test_head_groups_and_head_dims(check: Callable[..., None], heads: tuple[int, int], head_dim: int) -> None:
    check([19, 301], heads=heads, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(check: Callable[..., None], block_size: int) -> None:
    check([70, 300], block_size=block_size, heads=(2, 1), head_dim=32)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [((16, 2), 512, torch.bfloat16), ((2, 1), 320, torch.float32)])
def test_large_heads(check: Callable[..., None], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """The sizes of Gemma 4's global layers."""
    check([3, 300], heads=heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("sliding_window", [1, 7, 128, 300, 1000])
def test_sliding_windows(check: Callable[..., None], sliding_window: int) -> None:
    check([3, 700], sliding_window=sliding_window, heads=(3, 1), head_dim=32)


@pytest.mark.parametrize("chunk_size", [1, 100, 256, 1000])
def test_chunks(check: Callable[..., None], chunk_size: int) -> None:
    """A token at the start of a chunk, one at its end, some between, and a padding row."""
    check([3, 0, 512, 513, 700], chunk_size=chunk_size, heads=(3, 1), head_dim=32)


@pytest.mark.parametrize(
    ("dtype", "softcap", "has_sinks", "window"),
    [
        (torch.bfloat16, 1.5, False, None),
        (torch.bfloat16, None, True, 200),
        (torch.bfloat16, 1.5, True, None),
        pytest.param(torch.float32, 1.5, True, 200, marks=pytest.mark.full),
        pytest.param(torch.float16, 1.5, True, None, marks=pytest.mark.full),
    ],
)
def test_softcaps_and_sinks(
    check: Callable[..., None], dtype: torch.dtype, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    """A sequence in one split, one in several splits, and a padding row."""
    check(
        [3, 400, 0], heads=(6, 2), head_dim=32, dtype=dtype, softcap=softcap, has_sinks=has_sinks, sliding_window=window
    )


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "window"),
    [
        (torch.bfloat16, (9, 3), 64, None),
        (torch.bfloat16, (2, 1), 48, 200),
        pytest.param(torch.float32, (4, 2), 128, None, marks=pytest.mark.full),
        pytest.param(torch.float16, (2, 1), 48, 200, marks=pytest.mark.full),
    ],
)
def test_fp8_pools(
    check: Callable[..., None], dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    check([1, 300], heads=heads, head_dim=head_dim, dtype=dtype, fp8=True, sliding_window=window)


@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e9])
def test_queries_over_an_fp8_pool_may_be_larger_than_fp16_holds(
    device: str, randn: Randn, paged_context: PagedContext, assert_close: AssertClose, magnitude: float
) -> None:
    pool, tables = paged_context([90], 1, 32, 16, torch.float8_e4m3fn)
    q = randn(1, 2, 32) * magnitude
    lens = torch.tensor([90], dtype=torch.int32, device=device)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    options = {"scale": 1 / max(magnitude, 1.0), "sliding_window": None, "kv_scales": torch.ones(2, 2, 1).to(device)}
    workspace = DecodeWorkspace.allocate(1, 2, 32, 4, device)
    paged_decode_attention(q, pool, 1, tables, lens, **options, workspace=workspace, out=out)
    paged_decode_attention_reference(q, pool, 1, tables, lens, **options, out=expected)
    assert_close(out.half(), expected)


def test_more_sequences_than_splits(check: Callable[..., None]) -> None:
    """More sequences than splits, and a sequence with fewer tiles than planned splits, whose last splits are empty."""
    check([0, 513, 1, 0, 900, 129, 40], heads=(2, 1), head_dim=32, max_splits=2)
    check([641], heads=(2, 1), head_dim=32, max_splits=12)


def test_splits_for_device() -> None:
    assert splits_for_device(132, 8) == 49
    assert splits_for_device(132, 1) == 396
    assert splits_for_device(108, 64) == 5
    assert splits_for_device(4, 64) == 1


def test_an_empty_sequence_gives_zeros(check: Callable[..., None]) -> None:
    check([17, 0, 5], heads=(2, 1), head_dim=32)


def test_one_workspace_serves_two_calls(
    device: str, randn: Randn, paged_context: PagedContext, assert_close: AssertClose
) -> None:
    """A short context after a long one in the same workspace must not read the long one's splits."""
    workspace = DecodeWorkspace.allocate(1, 2, 32, 4, device)
    q = randn(1, 2, 32)
    for seq_len in (600, 20):
        pool, tables = paged_context([seq_len], 1, 32, 16, torch.float32)
        lens = torch.tensor([seq_len], dtype=torch.int32, device=device)
        out, expected = torch.empty_like(q), torch.empty_like(q)
        options = {"scale": 0.2, "sliding_window": None}
        paged_decode_attention(q, pool, 1, tables, lens, **options, workspace=workspace, out=out)
        paged_decode_attention_reference(q, pool, 1, tables, lens, **options, out=expected)
        assert_close(out, expected)


def test_offsets_beyond_31_bits(device: str, randn: Randn) -> None:
    pool = torch.empty((2**20 + 2, 1, 2, 1, 16, 64), dtype=torch.bfloat16, device=device)
    pool[2**20 + 1] = randn(1, 2, 1, 16, 64, dtype=torch.bfloat16)
    table = torch.tensor([[2**20 + 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([1], dtype=torch.int32, device=device)
    q = randn(1, 1, 64, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    workspace = DecodeWorkspace.allocate(1, 1, 64, 2, device)
    paged_decode_attention(q, pool, 0, table, lens, scale=0.125, sliding_window=None, workspace=workspace, out=out)
    # Attention to a single key returns its value.
    assert torch.equal(out[0], pool[2**20 + 1, 0, 1, :, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a device")
def test_a_captured_launch_follows_the_lengths(randn: Randn, paged_context: PagedContext) -> None:
    pool, tables = paged_context([900, 900], 2, 64, 16, torch.bfloat16)
    q = randn(2, 8, 64, dtype=torch.bfloat16)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    lens = torch.tensor([900, 900], dtype=torch.int32, device="cuda")
    workspace = DecodeWorkspace.allocate(2, 8, 64, 8, "cuda")
    options = {"scale": 0.125, "sliding_window": None}

    def step() -> None:
        paged_decode_attention(q, pool, 1, tables, lens, **options, workspace=workspace, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lens in ([1, 900], [256, 257], [0, 513]):
        lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        graph.replay()
        paged_decode_attention_reference(q, pool, 1, tables, lens, **options, out=expected)
        torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="an interpreted grid is not parallel")
def test_programs_that_finish_at_any_time_give_the_same_bits(randn: Randn, paged_context: PagedContext) -> None:
    """Whichever split of a sequence finishes last combines all of them, in their order."""
    lengths = [5000, 17, 0, 3000, 900, 64, *[16] * 11]
    pool, tables = paged_context(lengths, 8, 128, 16, torch.bfloat16)
    q = randn(len(lengths), 32, 128, dtype=torch.bfloat16)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    workspace = DecodeWorkspace.allocate(len(lengths), 32, 128, splits_for_device(132, 8), "cuda")
    options = {"scale": 0.1, "sliding_window": None}
    paged_decode_attention_reference(q, pool, 1, tables, lens, **options, out=expected)
    results = []
    for _ in range(200):
        out.fill_(math.nan)
        paged_decode_attention(q, pool, 1, tables, lens, **options, workspace=workspace, out=out)
        results.append(out.clone())
    assert all(torch.equal(result, out) for result in results)
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)
    assert not workspace.arrivals.any()


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    pool, q = randn(2, 1, 2, 1, 16, 64), randn(3, 2, 64)
    table, lens = (torch.zeros(s, dtype=torch.int32, device=device) for s in ((3, 2), (3,)))
    with pytest.raises(ValueError, match="max_splits is 0"):
        DecodeWorkspace.allocate(3, 2, 64, 0, device)

    def call(max_seqs: int = 3, head_dim: int = 64, **changes: object) -> None:
        workspace = DecodeWorkspace.allocate(max_seqs, 2, head_dim, 2, device)
        arguments = {"q": q, "pool": pool, "layer": 0, "block_tables": table, "seq_lens": lens, "scale": 1.0}
        arguments |= {"sliding_window": None, "workspace": workspace, "out": q.clone()}
        paged_decode_attention(**{**arguments, **changes})

    with pytest.raises(ValueError, match="3 sequences, the workspace holds 2"):
        call(max_seqs=2)
    with pytest.raises(ValueError, match="partial_out has shape"):
        call(head_dim=32)
    for changes, message in (
        ({"q": q.half()}, "q has dtype"),
        ({"out": q[:2]}, r"out has shape \(2, 2, 64\)"),
        ({"block_tables": table[:2]}, "block_tables has shape"),
        ({"seq_lens": lens.long()}, "seq_lens has dtype"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 8, "sliding_window": 8}, "sliding_window is 8 and chunk_size 8"),
        ({"kv_scales": torch.ones(1, 2, 1)}, "kv_scales is given for a pool of torch.float32"),
        ({"pool": pool.to(torch.float8_e4m3fn)}, "kv_scales is None for a pool of torch.float8_e4m3fn"),
        ({"pool": pool.to(torch.float8_e4m3fn), "kv_scales": torch.ones(2, 2, 1)}, r"expected \[1, 2, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
