"""Many small arrays are uploaded in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.engine.step.uploads import Joined, Uploader, packed_nbytes


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
            arrays.append(draws.integers(0, 9, size=200_000))  # larger than the existing buffer
        tensors = uploader.upload(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))


def test_arrays_can_arrive_as_one() -> None:
    parts = [np.empty((0, 2), np.int32), np.arange(6, dtype=np.int32).reshape(3, 2), np.full((1, 2), 9, np.int32)]
    before, joined, empty = Uploader(torch.device("cpu")).upload((np.arange(3), Joined(parts), Joined(parts[:1])))
    assert before.tolist() == [0, 1, 2]
    assert torch.equal(joined, torch.from_numpy(np.concatenate(parts)))
    assert (empty.shape, empty.dtype) == ((0, 2), torch.int32)


def test_arrays_arrive_in_memory_that_is_there_already() -> None:
    """A graph reads at fixed addresses, so each upload changes the values of the first one's tensors."""
    uploader = Uploader(torch.device("cpu"))
    arrays = (np.arange(3), np.arange(5, dtype=np.int32).reshape(1, 5))
    memory = torch.zeros(packed_nbytes(arrays) + 8, dtype=torch.uint8)
    memory[-8:] = 7
    first = uploader.upload(arrays, memory)
    uploader.upload([array + 100 for array in arrays], memory)
    assert [tensor.tolist() for tensor in first] == [[100, 101, 102], [[100, 101, 102, 103, 104]]]
    assert memory[-8:].tolist() == [7] * 8


def test_a_later_upload_leaves_earlier_ones_alone() -> None:
    uploader = Uploader(torch.device("cpu"))
    array = np.arange(100)
    (first,) = uploader.upload((array,))
    for value in range(20):
        uploader.upload((np.full(100, value),))
    array[:] = -1
    assert first.tolist() == list(range(100))
