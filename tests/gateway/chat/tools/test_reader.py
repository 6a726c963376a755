"""The JSON scanner accepts a value exactly up to the character where it ends or becomes invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.gateway.chat.tools.reader import JsonScanner, is_json_object

from .cases import CUTS, VALUES, pieces_of


def scanned(pieces: list[str]) -> tuple[int, bool]:
    """The number of accepted characters, and whether they are a whole value."""
    scanner = JsonScanner()
    total, left = 0, ""
    for piece in pieces:
        left += piece
        accepted = scanner.push(left)
        total, left = total + accepted, left[accepted:]
    total += scanner.push(left, is_last=True)
    return total, scanner.is_complete


@given(value=VALUES, indent=st.sampled_from([None, 2]), is_ascii=st.booleans(), cuts=CUTS)
def test_all_json_is_accepted(value: Any, indent: int | None, is_ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert scanned(pieces_of(text + ",x", cuts)) == (len(text), True)


@given(text=st.text(alphabet='{}[]",:\\u0123e+-.tfn \nalrse', max_size=24), cuts=CUTS)
def test_it_agrees_with_the_standard_library(text: str, cuts: list[int]) -> None:
    total, is_complete = scanned(pieces_of(text, cuts))
    assert (total, is_complete) == scanned([text])
    if is_complete:
        json.loads(text[:total])
    elif total == len(text):
        with pytest.raises(ValueError):  # noqa: PT011 - the library raises no other
            json.loads(text + "!")
    else:
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(text)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"a": 01}', 6),
        ('{"a": -}', 6),
        ('{"a": 1.}', 6),
        ('{"a": 1e}', 6),
        ('{"a": .5}', 6),
        ('{"a": +1}', 6),
        ('{"a" 1}', 5),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("[1 2]", 3),
        ("{1: 2}", 1),
        ("[}", 1),
        ("[trux]", 1),
        ('["\\x"]', 2),
        ('["\\u12g"]', 2),
        ('["\n"]', 2),
        ("[NaN]", 1),
    ],
)
def test_it_stops_where_the_text_breaks(text: str, accepted: int) -> None:
    assert scanned([text]) == (accepted, False)
    assert scanned(list(text)) == (accepted, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", True),
        ("[]", False),
        ("{} ", False),
        ('{"a": "\ud800"}', False),
        ("{", False),
        ("", False),
        (" {}", False),
    ],
)
def test_objects(text: str, expected: bool) -> None:
    assert is_json_object(text) is expected
