"""Bit masks on the CPU. tests/kernels has the tests of the GPU's kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.engine.sampling.bitmask import apply_bitmask
from kvrelay.engine.step.rules import num_words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 199, 1000])
def test_tokens_without_a_bit_are_forbidden(vocab: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab)
    bitmask = generator.integers(-(2**31), 2**31, (3, num_words(vocab)), dtype=np.int32)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    may_come = torch.tensor(
        [[bool(words[t // 32] >> (t % 32) & 1) for t in range(vocab)] for words in bitmask.tolist()]
    )
    expected = logits.clone()
    for words, row in zip(may_come, (4, 0, 3), strict=True):
        expected[row, ~words] = -torch.inf
    given = logits.clone()
    apply_bitmask(given, (4, 0, 3), bitmask)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_logit_that_is_not_a_number_stays_one_and_infinity_can_be_forbidden(dtype: torch.dtype) -> None:
    logits = torch.tensor([[torch.nan, torch.inf, torch.inf, 1.0]], dtype=dtype)
    apply_bitmask(logits, [0], np.array([[0b1011]], dtype=np.int32))
    assert logits[0].isnan().tolist() == [True, False, False, False]
    assert logits[0, 1:].tolist() == [torch.inf, -torch.inf, 1.0]
