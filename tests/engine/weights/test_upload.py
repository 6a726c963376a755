"""Tensors of files pass pinned memory in pieces, which are not overwritten before they are copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.engine.weights.headers import read_headers
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.upload import Pinned, TensorUpload, pieces

from .conftest import CPU
from .test_stored_parts import OTHERS, PARTS, SCHEMES, save

NUMBERS = torch.arange(7 * 6 * 10, dtype=torch.int16)


class Slow:
    """A device that is still copying whatever was recorded, until somebody waits for it."""

    def __init__(self) -> None:
        self.memory = torch.zeros(64, dtype=torch.uint8)
        self.copying: torch.Tensor | None = None

    def record(self) -> None:
        assert self.copying is None, "nobody waited for the piece before"
        self.copying = self.memory.clone()

    def synchronize(self) -> None:
        assert self.copying is None or torch.equal(self.copying, self.memory), "overwritten amid a copy"
        self.copying = None


def slow() -> Pinned:
    device = Slow()
    return Pinned(device.memory, device)


@pytest.mark.parametrize(
    ("tensor", "is_contiguous"),
    [
        (NUMBERS, True),
        (NUMBERS.view(7, 60), True),
        (NUMBERS.view(7, 6, 10), True),
        (NUMBERS.view(2, 210)[:1], True),  # a row larger than a piece
        (NUMBERS.view(7, 60)[:, 11:50], False),
        (NUMBERS.view(7, 6, 10)[2:, 1:4, 3:], False),
        (NUMBERS.view(7, 60).T, False),
        (NUMBERS[3], True),
        (NUMBERS[:0], True),
        (NUMBERS.view(7, 60)[:, :0], True),
    ],
)
def test_a_tensor_passes_in_pieces(tensor: torch.Tensor, is_contiguous: bool) -> None:
    found = list(pieces(tensor, 64))
    assert all(0 < piece.nbytes <= 64 for piece in found)
    assert not is_contiguous or all(piece.is_contiguous() for piece in found)
    assert torch.cat([NUMBERS[:0], *(piece.flatten() for piece in found)]).tolist() == tensor.flatten().tolist()
    upload = TensorUpload(CPU, slow)
    for _ in range(2):  # pieces of the first are still being copied
        copied = upload(tensor)
        assert torch.equal(copied, tensor)
        assert copied.is_contiguous()
        assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize("case", [*SCHEMES, *OTHERS])
def test_stored_weights_are_the_same_when_their_tensors_are_uploaded(case: str, tmp_path: Path) -> None:
    quantisation, headers = save(case, tmp_path), read_headers(tmp_path)

    def reader(upload: Callable[[torch.Tensor], torch.Tensor] | None) -> CheckpointReader:
        return CheckpointReader(headers, quantisation, torch.bfloat16, upload=upload)

    with reader(None) as here, reader(TensorUpload(CPU, slow)) as there:
        for rows, columns in PARTS:
            part = (range(1, 3), columns, rows) if case == "mxfp4" else (rows, columns)
            assert torch.equal(there.part("m.weight", part), here.part("m.weight", part))
        assert there.num_bytes_read == here.num_bytes_read
