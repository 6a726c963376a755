"""Penalties: the kernel and the vectorised reference against the definition, entry by entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.penalties import apply_penalties, apply_penalties_reference

Randn = Callable[..., torch.Tensor]
IMPLEMENTATIONS = [apply_penalties, apply_penalties_reference]


@pytest.mark.parametrize("apply", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_entries", [0, 1, 300])
def test_definition(device: str, randn: Randn, apply: Callable[..., None], num_entries: int) -> None:
    num_seqs, vocab = 4, 100
    # Wider than the vocabulary: the rows are strided.
    logits = randn(num_seqs, vocab + 3)[:, :vocab]
    pairs = torch.randperm(num_seqs * vocab, generator=torch.Generator().manual_seed(2))[:num_entries]
    rows, tokens = pairs // vocab, pairs % vocab
    counts = (pairs % 4).int()
    repetition, presence, frequency = (
        torch.tensor(x) for x in ([1.0, 1.3, 0.7, 2.0], [0.0, 0.5, -1.0, 2.0], [0.0, 0.25, 0.5, -2.0])
    )
    expected = logits.double().cpu()
    for row, token, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        value = expected[row, token].item()
        factor = repetition[row].item()
        value = value / factor if value > 0 else value * factor
        expected[row, token] = value - frequency[row].item() * count - presence[row].item() * (count > 0)
    apply(logits, *(t.to(device) for t in (rows, tokens, counts, repetition, presence, frequency)))
    torch.testing.assert_close(logits.double().cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("apply", IMPLEMENTATIONS)
def test_neutral_penalties_change_no_bit_and_minus_infinity_stays(
    device: str, randn: Randn, apply: Callable[..., None]
) -> None:
    logits = randn(2, 9)
    logits[1, 3] = -torch.inf
    before = logits.clone()
    ids = torch.tensor([0, 1], device=device)
    counts = torch.tensor([2, 3], dtype=torch.int32, device=device)
    one, zero = torch.ones(2, device=device), torch.zeros(2, device=device)
    apply(logits, ids, torch.tensor([4, 3], device=device), counts, one, zero, zero)
    assert torch.equal(logits, before)


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    logits, row = randn(2, 9), torch.ones(2, device=device)
    ids = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="output_counts has dtype"):
        apply_penalties(logits, ids, ids, ids, row, row, row)
    with pytest.raises(ValueError, match=r"presence has shape \(1,\), expected \[2\]"):
        apply_penalties(logits, ids, ids, ids.int(), row, row[:1], row)
    with pytest.raises(ValueError, match="logits has dtype"):
        apply_penalties(logits.half(), ids, ids, ids.int(), row, row, row)
