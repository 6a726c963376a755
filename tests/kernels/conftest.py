"""Fixtures of the kernel tests, which run on a GPU if there is one, and else in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from triton.runtime import interpreter

from kvrelay.kernels.rows import norm
from tests.triton_interpreter import mend_loops, mend_numbers

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}

# `make test` uses only the dtype of the models that we serve. Other dtypes differ in casts, not in paths.
DTYPES = [torch.bfloat16, *(pytest.param(other, marks=pytest.mark.full) for other in (torch.float32, torch.float16))]


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def faithful_interpreter(device: str) -> Iterator[None]:
    """Close the gaps of the interpreter."""
    if device == "cuda":
        # Triton 3.9 warns if this is unset, and warnings are errors here; 1 is its default.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
            yield
        return
    assert isinstance(norm._rms_norm_kernel, interpreter.InterpretedFunction), (
        "kvrelay.kernels was imported without TRITON_INTERPRET=1, see tests/conftest.py"
    )
    with pytest.MonkeyPatch.context() as patch:
        mend_loops(patch)
        mend_numbers(patch)
        yield


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element that a wrapper leaves unwritten fails the comparison."""
    # A documented side effect, see torch.utils.deterministic.fill_uninitialized_memory.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare a result with its float64 reference, with the tolerance of the result's dtype. NaN fails."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCES[actual.dtype])

    return check


@pytest.fixture
def randn(device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return make


@pytest.fixture
def paged_context(device: str, randn: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make a pool and shuffled block tables. Every unused slot is NaN."""

    def make(
        seq_lens: list[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks_of = [math.ceil(n / block_size) for n in seq_lens]
        num_blocks = sum(blocks_of) + 1
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(device)
        pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), math.nan).to(device, dtype)
        # The last block of the shuffled order stays NaN and pads the tables.
        tables = order[-1].repeat(len(seq_lens), max(blocks_of) + 1).int()
        first = 0
        for table, seq_len, count in zip(tables, seq_lens, blocks_of, strict=True):
            table[:count] = order[first : first + count]
            first += count
            for position in range(seq_len):
                slot = randn(2, num_kv_heads, head_dim, dtype=dtype)
                pool[table[position // block_size], 1, :, :, position % block_size] = slot
        return pool, tables

    return make
