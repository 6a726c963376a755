"""The limits that all of several workers share."""

from __future__ import annotations

import msgspec

from kvrelay.common.model_card import SharedLimits
from kvrelay.engine.fake.engine import fake_card


def test_the_smallest_limit_counts_and_what_all_have() -> None:
    card = fake_card(num_blocks=64, block_size=16, vocab_size=1000)
    small = msgspec.structs.replace(card, max_model_len=100, processors=("a", "b"))
    large = msgspec.structs.replace(card, max_model_len=200, vocab_size=900, processors=("b", "c"))
    assert SharedLimits.of([small, large]) == SharedLimits(100, 900, frozenset({"b"}))
    assert SharedLimits.of([small]) == SharedLimits(100, 1000, frozenset({"a", "b"}))
