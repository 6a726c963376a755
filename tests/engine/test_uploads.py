"""Many small arrays in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.engine.uploads import Uploader


@pytest.mark.parametrize("seed", range(20))
def test_every_array_arrives_with_its_shape_and_type(seed: int) -> None:
    draws = np.random.default_rng(seed)
    uploader = Uploader(torch.device("cpu"))
    for _ in range(20):  # more than there are buffers
        arrays = []
        for _ in range(draws.integers(1, 7)):
            shape = tuple(draws.integers(0, 40, size=draws.integers(1, 3)))
            dtype = draws.choice([np.int64, np.int32, np.float32, np.float64, np.uint8])
            arrays.append((draws.random(shape) * 100).astype(dtype))
        arrays.append(np.arange(30).reshape(5, 6)[:, ::2])  # not contiguous
        if draws.random() < 0.3:
            arrays.append(draws.integers(0, 9, size=200_000))  # beyond the buffer that there was
        tensors = uploader.upload(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))


def test_a_later_upload_leaves_earlier_ones_alone() -> None:
    uploader = Uploader(torch.device("cpu"))
    array = np.arange(100)
    (first,) = uploader.upload((array,))
    for value in range(20):
        uploader.upload((np.full(100, value),))
    array[:] = -1
    assert first.tolist() == list(range(100))
