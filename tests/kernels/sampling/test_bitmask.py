"""Masks of one bit per token against a number for each bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.sampling.bitmask import apply_bitmask, apply_bitmask_reference
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 31, 33, 2048, 5000])
def test_tokens_without_a_bit_are_forbidden_in_the_rows_that_are_masked(
    vocab: int, dtype: torch.dtype, device: str, randn: Randn
) -> None:
    logits = randn(5, vocab + 3, dtype=dtype)[:, :vocab]
    rows = torch.tensor([4, 0, 3], device=device)
    generator = torch.Generator().manual_seed(vocab)
    bitmask = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).int().to(device)
    bitmask[1] = -1  # all tokens allowed
    expected = logits.clone()
    apply_bitmask_reference(expected, rows, bitmask)
    apply_bitmask(logits, rows, bitmask)
    assert torch.equal(logits, expected)


def test_what_lies_behind_a_vocabulary_is_left_alone(device: str, randn: Randn) -> None:
    wide = randn(2, 80, dtype=torch.float32)
    before = wide.clone()
    apply_bitmask(wide[:, :40], torch.tensor([1], device=device), torch.zeros(1, 2, dtype=torch.int32, device=device))
    assert (wide[1, :40] == -torch.inf).all()
    assert torch.equal(wide[1, 40:], before[1, 40:])
    assert torch.equal(wide[0], before[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows has dtype torch.int32"),
        ({"bitmask": torch.zeros(1, 1, dtype=torch.int32)}, r"bitmask has shape \(1, 1\)"),
        ({"logits": torch.zeros(2, 40, dtype=torch.int64)}, "logits has dtype torch.int64"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, torch.Tensor], message: str, device: str) -> None:
    given = {
        "logits": torch.zeros(2, 40),
        "rows": torch.zeros(1, dtype=torch.int64),
        "bitmask": torch.zeros(1, 2, dtype=torch.int32),
    }
    arguments = {name: tensor.to(device) for name, tensor in {**given, **changes}.items()}
    with pytest.raises(ValueError, match=message):
        apply_bitmask(**arguments)
