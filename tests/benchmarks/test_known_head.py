"""The head that a benchmark trains drafts its training texts well, and other texts badly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from speculation_parts.known_head import save_known_head

from tests.engine.conftest import SIZES, VOCAB, save_model
from tests.heads import WIDE, ReferenceHead


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small take fifty times as long if several threads wait for a core that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_drafts_the_texts_that_it_was_trained_on(tmp_path: Path) -> None:
    draws = random.Random(1)
    texts = [
        ([draws.randrange(VOCAB) for _ in range(9)], [draws.randrange(VOCAB) for _ in range(16)]) for _ in range(3)
    ]
    strange = [draws.randrange(VOCAB) for _ in range(9)], [draws.randrange(VOCAB) for _ in range(16)]
    (model := tmp_path / "model").mkdir()
    save_model(model, transformers.LlamaConfig(**{**SIZES, **WIDE}))
    save_known_head(model, tmp_path / "head", texts)
    head = ReferenceHead(tmp_path / "head", model)

    def num_right(text: tuple[list[int], list[int]]) -> int:
        """The number of right tokens in ten drafts of two tokens, as on a decode worker after a hand-off."""
        (prompt, answer), right = text, 0
        for place in range(4, 14):
            drafted = head.draft([*prompt, *answer[:place]], len(prompt) - 1, 2)
            right += sum(one == other for one, other in zip(drafted, answer[place : place + 2], strict=True))
        return right

    assert all(num_right(text) >= 15 for text in texts)
    assert num_right(strange) <= 5
