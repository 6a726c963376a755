"""Watermarked generation raises exactly the green tokens, and the detector finds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.common.sampling import Watermark
from kvrelay.engine.sampling.watermark import green_on_device, is_green, keys_of, threshold_of
from kvrelay.engine.step.sequence import Sequence
from kvrelay.launcher.watermark import detect
from tests.engine.conftest import sequence
from tests.engine.sampling.rig import processed, run


def generated(
    num_tokens: int, num_rows: int, vocab: int, watermark: Watermark | None, temperature: float
) -> list[Sequence]:
    """Rows of one prompt token and ``num_tokens`` sampled ones, each sampled from new logits."""
    rows = [sequence([row], [], temperature=temperature, seed=row, watermark=watermark) for row in range(num_rows)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_tokens):
        logits = torch.randn(num_rows, vocab, generator=generator) * 2
        for row, token in zip(rows, run(logits, rows), strict=True):
            row.token_ids.append(token.token_id)
    return rows


def test_green_tokens_are_raised_and_no_others() -> None:
    logits = torch.randn(3, 777, generator=torch.Generator().manual_seed(1))
    rows = [
        sequence([9, 4], [], watermark=Watermark(gamma=0.25, delta=3.5)),
        sequence([9, 4], []),
        sequence([4, 9], [], watermark=Watermark()),
    ]
    raised = processed(logits, rows) - logits
    vocab = np.arange(777, dtype=np.uint32)
    for row, previous, gamma, delta in ((0, 4, 0.25, 3.5), (2, 9, 0.5, 2.0)):
        green = torch.from_numpy(is_green(np.full_like(vocab, previous), vocab, gamma))
        torch.testing.assert_close(raised[row], green * delta, atol=1e-5, rtol=0)
    assert not raised[1].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_watermark_is_found_in_two_hundred_tokens_and_not_where_there_is_none(temperature: float) -> None:
    marked = generated(200, 6, 1000, Watermark(), temperature)
    plain = generated(200, 6, 1000, None, temperature)
    assert min(detect(row.token_ids).z for row in marked) > 4
    assert max(detect(row.token_ids).z for row in plain) < 4
    # With another gamma the watermark is another one.
    quarter = generated(200, 2, 1000, Watermark(gamma=0.25), temperature)
    assert min(detect(row.token_ids, 0.25).z for row in quarter) > 4


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.999])
def test_the_gpus_way_makes_the_same_tokens_green(gamma: float) -> None:
    vocab = np.arange(49_157, dtype=np.uint32)
    for previous in (0, 1, 77, 49_156):
        keys = keys_of(np.array([previous], dtype=np.uint32))
        given = green_on_device(keys, len(vocab), threshold_of(gamma), torch.device("cpu"))
        assert np.array_equal(given.numpy(), is_green(np.full_like(vocab, previous), vocab, gamma))


def test_what_is_forbidden_stays_forbidden() -> None:
    logits = torch.zeros(1, 100)
    row = sequence([3], [], watermark=Watermark(delta=50.0), allowed_token_ids=(1, 2))
    assert processed(logits, [row]).isfinite().nonzero()[:, 1].tolist() == [1, 2]
