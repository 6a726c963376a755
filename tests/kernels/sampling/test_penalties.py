"""Penalties: the kernel and the vectorised reference against the definition, entry by entry."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.sampling.penalties import NewTokens, apply_penalties, apply_penalties_reference

Randn = Callable[..., torch.Tensor]
IMPLEMENTATIONS = [apply_penalties, apply_penalties_reference]


@pytest.mark.parametrize("apply", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_entries", [0, 1, 300])
def test_definition(device: str, randn: Randn, apply: Callable[..., None], num_entries: int) -> None:
    num_seqs, vocab = 4, 100
    # Wider than the vocabulary, so that the rows are strided.
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


def random_counts(draws: random.Random, vocab: int, num_entries: int) -> dict[int, int]:
    return {token: draws.choice((0, 1, 1, 2, 5)) for token in draws.sample(range(vocab), num_entries)}


@pytest.mark.parametrize("apply", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_entries", [(0, 0, 0), (1, 1, 1), (0, 3, 0, 250), (30, 1500, 0, 1024, 255, 2100)])
def test_new_tokens_count_as_if_they_had_been_known(
    device: str, randn: Randn, apply: Callable[..., None], num_entries: tuple[int, ...]
) -> None:
    """Some new tokens have an entry already, anywhere in the row. Others get a new one. Some rows have no new token."""
    draws, vocab, num_seqs = random.Random(sum(num_entries)), 3000, len(num_entries)
    logits = randn(num_seqs, vocab + 5)[:, :vocab]
    repetition = [draws.choice((1.0, 1.3, 0.6)) for _ in range(num_seqs)]
    presence = [draws.choice((0.0, 0.5, -1.0)) for _ in range(num_seqs)]
    frequency = [draws.choice((0.25, -0.5, 2.0)) for _ in range(num_seqs)]
    penalties = [torch.tensor(values, device=device) for values in (repetition, presence, frequency)]
    for case in range(8):
        rows = [random_counts(draws, vocab, count) for count in num_entries]
        is_new = [draws.random() < 0.8 for _ in rows]
        new = [
            # The first, the last or any other entry, an entry of another row, or a token without an entry.
            draws.choice([*list(counts)[:1], *list(counts)[-1:], draws.choice([*counts, 0]), draws.randrange(vocab), 7])
            for counts in rows
        ]
        starts = [sum(num_entries[:row]) for row in range(num_seqs + 1)]
        given = NewTokens(
            torch.tensor(new, device=device),
            torch.tensor(is_new, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
        )
        entries = [(row, token, count) for row, counts in enumerate(rows) for token, count in counts.items()]
        known = [torch.tensor([entry[at] for entry in entries], dtype=torch.int64, device=device) for at in range(3)]
        expected = logits.double().cpu()
        for row, counts in enumerate(rows):
            if is_new[row]:
                counts[new[row]] = counts.get(new[row], 0) + 1
            for token, count in counts.items():
                value = expected[row, token].item()
                value = value / repetition[row] if value > 0 else value * repetition[row]
                expected[row, token] = value - frequency[row] * count - presence[row] * (count > 0)
        found = logits.clone()
        apply(found, known[0], known[1], known[2].int(), *penalties, given)
        torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-6, atol=1e-6, msg=f"case {case}")
        # Bit-identical to counting on the host.
        entries = [(row, token, count) for row, counts in enumerate(rows) for token, count in counts.items()]
        counted = [torch.tensor([entry[at] for entry in entries], dtype=torch.int64, device=device) for at in range(3)]
        by_host = logits.clone()
        apply(by_host, counted[0], counted[1], counted[2].int(), *penalties)
        assert torch.equal(found, by_host), case


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    logits, row = randn(2, 9), torch.ones(2, device=device)
    ids = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="output_counts has dtype"):
        apply_penalties(logits, ids, ids, ids, row, row, row)
    with pytest.raises(ValueError, match=r"presence has shape \(1,\), expected \[2\]"):
        apply_penalties(logits, ids, ids, ids.int(), row, row[:1], row)
    with pytest.raises(ValueError, match="logits has dtype"):
        apply_penalties(logits.half(), ids, ids, ids.int(), row, row, row)
    starts = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    tokens = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"new\.row_starts has shape \(2,\), expected \[3\]"):
        apply_penalties(logits, ids, ids, ids.int(), row, row, row, NewTokens(tokens, tokens.int(), starts[:2]))
    with pytest.raises(ValueError, match=r"new\.counts has dtype"):
        apply_penalties(logits, ids, ids, ids.int(), row, row, row, NewTokens(tokens, tokens, starts))
    with pytest.raises(ValueError, match=r"new\.token_ids has shape \(1,\), expected \[2\]"):
        apply_penalties(logits, ids, ids, ids.int(), row, row, row, NewTokens(tokens[:1], tokens.int(), starts))
