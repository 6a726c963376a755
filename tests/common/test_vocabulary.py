"""Block hashes, model cards and log lines."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.block_hash import block_hash, chain_hashes, root_hash
from kvrelay.common.logs import JsonFormatter, TextFormatter
from kvrelay.common.model_card import KvLayout
from kvrelay.common.sampling import SamplingParams

ROOT = root_hash(b"model")
TOKENS = st.lists(st.integers(0, 2**31), max_size=40)

LAYOUT = KvLayout(
    model_id="m",
    weights_digest="w",
    kv_dtype="bfloat16",
    num_layers=2,
    num_kv_heads=1,
    head_dim=64,
    block_size=16,
    rope="r",
)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(first: list[int], second: list[int], size: int) -> None:
    one, other = chain_hashes(ROOT, first, size), chain_hashes(ROOT, second, size)
    assert len(one) == -(-len(first) // size)
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        assert (left == right) == (first[: (index + 1) * size] == second[: (index + 1) * size])


@given(tokens=TOKENS, size=st.integers(1, 8), known=st.integers(0, 5))
def test_a_chain_can_be_continued(tokens: list[int], size: int, known: int) -> None:
    whole = chain_hashes(ROOT, tokens, size)
    num_full = len(tokens) // size
    assert chain_hashes(ROOT, tokens, size, known=whole[: min(known, num_full)]) == whole


def test_model_and_extra_keys_are_part_of_the_hash() -> None:
    assert chain_hashes(ROOT, [1, 2], 2) != chain_hashes(root_hash(b"other"), [1, 2], 2)
    assert block_hash(ROOT, [1, 2], b"adapter") != block_hash(ROOT, [1, 2])
    assert block_hash(ROOT, [2], b"\x01\x00\x00\x00") != block_hash(ROOT, [1, 2])


def test_fingerprints_are_equal_exactly_for_equal_layouts() -> None:
    assert LAYOUT.fingerprint() == msgspec.structs.replace(LAYOUT).fingerprint()
    for name in LAYOUT.__struct_fields__:
        value = getattr(LAYOUT, name)
        other = msgspec.structs.replace(LAYOUT, **{name: value + 1 if isinstance(value, int) else value + "x"})
        assert other.fingerprint() != LAYOUT.fingerprint()
        assert [text.split(":")[0] for text in LAYOUT.differences(other)] == [name]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalties_are_known_to_be_needed(changes: dict[str, float], expected: bool) -> None:
    assert SamplingParams(max_tokens=1, **changes).needs_penalties is expected  # type: ignore[arg-type]


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("kvrelay.x", logging.WARNING, "f.py", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_log_lines_carry_the_request() -> None:
    line = TextFormatter().format(record("lost", request_id="r", attempt=2))
    assert line.endswith("WARNING lost request_id=r attempt=2")
    parsed = json.loads(JsonFormatter().format(record("lost", request_id="r", attempt=2)))
    assert (parsed["level"], parsed["message"], parsed["request_id"], parsed["attempt"]) == ("warning", "lost", "r", 2)
