"""The peers of benchmarks/gpu.py: one compilation serves many problems, and a peer skipped for lack of time is
reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts.frame.rows import Row
from gpu_parts.frame.running import Context
from gpu_parts.frame.session import Session
from gpu_parts.frame.sizes import TINY, dry_sizes
from gpu_parts.kernels import attention
from gpu_parts.kernels.paged import attention_float64, paged_context, random_pool
from gpu_parts.kernels.peers import NO_TIME, Problem, measure_peers


def problem(num_seqs: int, query_len: int, length: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    pool = random_pool(TINY, num_seqs * (length // 16 + 1) + 1, 1, torch.float32, generator)
    paged = paged_context(pool, 0, (length,) * num_seqs, generator)
    query = torch.randn(num_seqs * query_len, TINY.num_q_heads, TINY.head_dim, generator=generator)
    return Problem(query, query_len, paged)


def test_with_little_time_only_the_peer_that_is_compiled_is_left_out() -> None:
    stopwatch = Context(dry_sizes(), "cpu", True, Path(), time.monotonic() + 100, 7).stopwatch()
    one = problem(2, 1, 40)
    ours = torch.cat(
        [
            attention_float64(one.query[index : index + 1].double(), one.paged.keys_values(index).double())
            for index in range(2)
        ]
    )
    peers = {peer.name: peer for peer in measure_peers(one, ours, stopwatch, may_compile=False)}
    assert peers["flex_attention, contiguous"].absence == NO_TIME
    assert peers["SDPA, contiguous"].value is not None


@pytest.mark.parametrize("run", [attention.measure_decode, attention.measure_prefill, attention.measure_decode_fp8])
def test_cells_without_time_are_named(run: Callable[..., Any], tmp_path: Path) -> None:
    late = Context(dry_sizes(), "cpu", True, tmp_path, time.monotonic() + 1, 7)
    rows = [finding for finding in run(late) if isinstance(finding, Row)]
    assert rows
    assert all(row.value is None and row.note == NO_TIME for row in rows)
    session = Session(late, lambda line: None, rows=rows)
    told = session.report().split("not measured:")[1]
    assert all(f"- {row.figure}: {NO_TIME}" in told for row in rows)
