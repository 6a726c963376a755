"""How large a pool gets, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.engine_options import EngineOptions, device_of, kv_dtype_of, num_blocks_of

BLOCK_NBYTES = 1000


def options(**chosen: object) -> EngineOptions:
    return EngineOptions(Path(), "m", **chosen)  # type: ignore[arg-type]


def test_a_gpus_pool_is_its_share_of_what_is_free() -> None:
    def free() -> int:
        return 100_000

    assert num_blocks_of(options(), BLOCK_NBYTES, free) == 90
    assert num_blocks_of(options(kv_memory_fraction=0.3), BLOCK_NBYTES, free) == 30
    assert num_blocks_of(options(kv_memory_bytes=42_999), BLOCK_NBYTES, free) == 42
    assert num_blocks_of(options(num_blocks=7), BLOCK_NBYTES, free) == 7
    with pytest.raises(
        ModelError, match=r"--kv-memory-fraction 0.9 gives a pool of 0 blocks .* raise --kv-memory-fraction"
    ):
        num_blocks_of(options(), BLOCK_NBYTES, lambda: 900)


def test_nothing_is_measured_that_is_not_needed() -> None:
    def measure() -> int:
        raise AssertionError("measured")

    assert num_blocks_of(options(kv_memory_bytes=42_999), BLOCK_NBYTES, measure) == 42
    assert num_blocks_of(options(num_blocks=7), BLOCK_NBYTES, measure) == 7


def test_without_a_gpu_there_is_a_default() -> None:
    assert num_blocks_of(options(), 2**20, None) == 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="--device is cuda, but torch finds no GPU"):
        device_of("cuda")
    assert device_of("auto").type == "cpu"


def test_only_a_gpu_has_a_pool_in_fp8() -> None:
    assert kv_dtype_of("auto", torch.bfloat16, torch.device("cpu")) is torch.bfloat16
    assert kv_dtype_of("fp8", torch.bfloat16, torch.device("cuda")) is torch.float8_e4m3fn
    with pytest.raises(ModelError, match="--kv-dtype is fp8, which needs a GPU"):
        kv_dtype_of("fp8", torch.bfloat16, torch.device("cpu"))
