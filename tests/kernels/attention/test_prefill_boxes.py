"""Prefill attention that loads its tiles as boxes, against float64 and against pointers. The interpreter counts the loads.

Below Hopper Triton replaces boxes by pointers. The results are compared there, but loads are not counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from kvrelay.kernels.attention import prefill
from kvrelay.kernels.attention.prefill import paged_prefill_attention
from kvrelay.kernels.attention.prefill_tiles import TileLoads, choose_tile
from kvrelay.kernels.attention.reference import paged_prefill_attention_reference
from tests.last_seen import random_last_seen

Randn = Callable[..., torch.Tensor]
PagedContext = Callable[..., tuple[torch.Tensor, torch.Tensor]]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]
Attend = Callable[[TileLoads | None], torch.Tensor]
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A pool's geometry and the kernel's options."""

    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    window: int | None = None
    has_images: bool = False

    def num_boxes(self, query_lens: list[int], seq_lens: list[int]) -> int:
        """The number of boxes to load: keys and values of every tile that all rows of a program see, for every
        program."""
        tile = choose_tile(self.head_dim, 1 if self.fp8 else self.dtype.itemsize, sees_ahead=self.has_images)
        group, found = self.heads[0] // self.heads[1], 0
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            for first_row in range(0, query_len * group, tile.rows):
                found += (seq_len - query_len + first_row // group + 1) // tile.keys
        return 2 * self.heads[1] * found


@pytest.fixture
def box_loads() -> Iterator[list[None]]:
    """A list that gets one element for each box that the interpreter loads."""
    found: list[None] = []
    original = interpreter.InterpreterBuilder.create_descriptor_load

    def load(self: Any, *arguments: Any) -> Any:
        found.append(None)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_descriptor_load", load)
        yield found


@pytest.fixture
def problem(device: str, randn: Randn, paged_context: PagedContext, assert_close: AssertClose) -> Callable[..., Attend]:
    """A random problem whose kernel result is compared with float64. Slots without a key are NaN, even in last
    blocks."""

    def make(case: Case, query_lens: list[int], seq_lens: list[int]) -> Attend:
        num_q_heads, num_kv_heads = case.heads
        pool_dtype = _FP8 if case.fp8 else case.dtype
        pool, tables = paged_context(seq_lens, num_kv_heads, case.head_dim, case.block_size, pool_dtype)
        scales = torch.linspace(0.3, 1.2, 4 * num_kv_heads).view(2, 2, -1).to(device) if case.fp8 else None
        q = randn(sum(query_lens), num_q_heads, case.head_dim, dtype=case.dtype)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        options = {"scale": case.head_dim**-0.5, "sliding_window": case.window, "kv_scales": scales}
        options |= {"max_query_len": max(query_lens)}
        seen = torch.from_numpy(random_last_seen(query_lens, seq_lens)).int().to(device) if case.has_images else None
        options |= {"last_seen": seen}
        expected = torch.full(q.shape, math.nan, dtype=torch.float64, device=device)
        wide = pool if case.fp8 else pool.double()
        paged_prefill_attention_reference(q.double(), wide, 1, tables, starts, lens, **options, out=expected)

        def attend(loads: TileLoads | None) -> torch.Tensor:
            out = torch.full_like(q, math.nan)
            paged_prefill_attention(q, pool, 1, tables, starts, lens, **options, out=out, loads=loads)
            assert_close(out, expected)
            return out

        return attend

    return make


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=pytest.mark.full),
        Case(has_images=True),
        Case(dtype=torch.float16, heads=(2, 2), head_dim=16),
        pytest.param(Case(heads=(6, 2), head_dim=128), marks=pytest.mark.full),
        pytest.param(Case(heads=(2, 1), head_dim=256, block_size=32), marks=pytest.mark.full),
        pytest.param(Case(heads=(3, 1), head_dim=256, block_size=64), marks=pytest.mark.full),
        pytest.param(Case(fp8=True), marks=pytest.mark.full),
        Case(fp8=True, heads=(4, 1), head_dim=128, dtype=torch.float16),
    ],
    ids=str,
)
def test_boxes_and_pointers_give_the_same_numbers(
    problem: Callable[..., Attend], box_loads: list[None], device: str, case: Case
) -> None:
    """A whole prompt, chunks after prefixes, an empty query, one token, a full tile, the start of a block, and random
    cases."""
    query_lens, seq_lens = [45, 20, 0, 1, 16, 72], [45, 133, 30, 70, 64, 200]
    rng = random.Random(case.head_dim)
    for _ in range(2):
        seq_lens.append(rng.randint(1, 200))
        query_lens.append(rng.randint(1, seq_lens[-1]))
    attend = problem(case, query_lens, seq_lens)
    by_boxes = attend(TileLoads.BOXES)
    num_boxes = len(box_loads)
    by_pointers = attend(TileLoads.POINTERS)
    torch.testing.assert_close(by_boxes, by_pointers)
    if device == "cpu":
        assert num_boxes == case.num_boxes(query_lens, seq_lens) > 0
        assert len(box_loads) == num_boxes, "pointers loaded boxes"
        assert torch.equal(by_boxes, by_pointers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's boxes are not counted")
@pytest.mark.parametrize(
    ("capability", "case", "has_boxes"),
    [
        ((9, 0), Case(), True),
        ((10, 0), Case(head_dim=128, heads=(2, 1)), True),
        ((9, 0), Case(block_size=16), False),
        ((9, 0), Case(block_size=32), False),
        ((9, 0), Case(head_dim=96, heads=(2, 1)), False),
        ((9, 0), Case(window=70), False),
        ((9, 0), Case(dtype=torch.float32), False),
        ((8, 0), Case(), False),
        (None, Case(), False),
    ],
    ids=str,
)
def test_boxes_are_used_without_being_asked_for_where_they_can_be(
    problem: Callable[..., Attend],
    box_loads: list[None],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    case: Case,
    has_boxes: bool,
) -> None:
    monkeypatch.setattr(prefill, "nvidia_capability", lambda device: capability)
    query_lens, seq_lens = [33, 9], [33, 150]
    problem(case, query_lens, seq_lens)(None)
    assert len(box_loads) == (case.num_boxes(query_lens, seq_lens) if has_boxes else 0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(block_size=32), "blocks of 32 tokens under tiles of 64"),
        (Case(window=70), "a window"),
        (Case(dtype=torch.float32), "numbers of torch.float32"),
    ],
    ids=str,
)
def test_boxes_are_refused_where_they_cannot_be(problem: Callable[..., Attend], case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=f"tiles cannot be loaded as boxes: {message}"):
        problem(case, [5], [70])(TileLoads.BOXES)
