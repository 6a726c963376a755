"""A tokenizer.json that is made of tiktoken's ranks: equal tokens, special tokens, and a directory that stays as it was."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from kvrelay.common.errors import ModelError
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.tiktoken_file import PATTERN, convert

TEXT = (
    "I'll say we've done what they'd want: it's John's turn, WE'VE SHOUTED. 人工智能正在改变世界。人工智能abc正在 12345 km…\n\n"
    "  def f(x):\n\treturn  x  # naïve café, こんにちは世界, 한국어 中文\r\n"
)
OTHERS = (
    "thereturn they'rereturning",
    " WORLD's인공지능 世界改变abc'LLx",
    "\u00a0\u2009 \U0001f600é\u0301\n \n",
    "1234567 x²³",
    "",
)


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """tiktoken's algorithm: the pair whose joined token has the lowest rank is merged, the first of equal ones."""
    if piece in ranks:
        return [piece]
    parts = [piece[place : place + 1] for place in range(len(piece))]
    while True:
        found = [(ranks.get(left + right), place) for place, (left, right) in enumerate(pairwise(parts))]
        known = [(rank, place) for rank, place in found if rank is not None]
        if not known:
            return parts
        _, place = min(known)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def pieces_of(text: str) -> list[bytes]:
    return [piece.encode() for piece in regex.findall(PATTERN, text, regex.VERSION1)]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Bytes in an order of their own, then pairs by how often they are in the text."""
    found = {bytes([(byte * 7 + 33) % 256]): byte for byte in range(256)}
    for _ in range(150):
        pairs: Counter[bytes] = Counter()
        for piece in pieces_of(TEXT):
            parts = merged(piece, found)
            pairs.update(left + right for left, right in pairwise(parts))
        if not pairs:
            break
        found[max(pairs, key=lambda pair: (pairs[pair], pair))] = len(found)
    return found


@pytest.fixture
def kimi(ranks: dict[bytes, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory as of Kimi K2, which nobody may write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "Kimi-K2"
    directory.mkdir()
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(ranks)
    write(directory, {
        "tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(first): {"content": "[BOS]", "special": True}, str(first + 1): {"content": "[EOS]", "special": True},
            str(first + 4): {"content": "<|tool_call_begin|>", "special": False},
        },
    })  # fmt: skip
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "model.safetensors").chmod(0o444)
    (directory / "tokenization_kimi.py").write_text("raise RuntimeError('code of a checkpoint')")
    directory.chmod(0o555)
    return directory


def write(directory: Path, config: dict[str, Any]) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("text", [TEXT, *OTHERS])
def test_tokens_are_those_of_tiktoken(text: str, kimi: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = Tokenizer.load(resolve_model(str(kimi)))
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    assert token_ids == [ranks[token] for piece in pieces_of(text) for token in merged(piece, ranks)]
    assert tokenizer.decode_all(token_ids) == text


def test_special_tokens_are_those_that_the_config_names(kimi: Path, ranks: dict[bytes, int]) -> None:
    tokenizer, first = Tokenizer.load(resolve_model(str(kimi))), len(ranks)
    text = f"[BOS]a<|tool_call_begin|><|reserved_token_{first + 255}|>[EOS]"
    assert tokenizer.encode(text, add_special_tokens=False) == [first, ranks[b"a"], first + 4, first + 255, first + 1]
    assert tokenizer.decode([first, ranks[b"a"], first + 4, first + 255]) == "a<|tool_call_begin|>"
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.eos_ids == (first + 1,)


def test_the_model_stays_where_it_is(kimi: Path) -> None:
    made = resolve_model(str(kimi))
    assert (made.name, resolve_model(str(kimi))) == (kimi.name, made)
    assert not (kimi / "tokenizer.json").exists()
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert (kimi / "model.safetensors").stat().st_mode & 0o777 == 0o444
    assert (made / "tokenizer.json").stat().st_mode & 0o777 == 0o644


def test_ranks_of_an_unknown_tokenizer_are_not_guessed_at(kimi: Path) -> None:
    kimi.chmod(0o755)
    write(
        kimi, {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["mine.TikTokenTokenizer", None]}}
    )
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; make one"):
        resolve_model(str(kimi))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"IQ== zero", r"tiktoken\.model cannot be read: invalid literal"),
        (b"IQ== 0", r"tiktoken\.model does not number its tokens from 0 on, or lacks a byte"),
    ],
)
def test_a_broken_file_is_named(content: bytes, reason: str, kimi: Path) -> None:
    kimi.chmod(0o755)
    (kimi / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        resolve_model(str(kimi))


def test_a_token_with_two_numbers_is_refused(kimi: Path, ranks: dict[bytes, int]) -> None:
    kimi.chmod(0o755)
    twice = {str(len(ranks) + place): {"content": "[BOS]", "special": True} for place in (0, 1)}
    write(kimi, {"added_tokens_decoder": twice})
    with pytest.raises(ModelError, match=r"has token '\[BOS\]' as .*, and a second time"):
        convert(kimi)


@pytest.mark.parametrize(
    "tokens", [["[BOS]"], {"first": {"content": "[BOS]"}}, {"400": "[BOS]"}, {"400": {"special": True}}]
)
def test_broken_added_tokens_are_named(tokens: Any, kimi: Path) -> None:
    kimi.chmod(0o755)
    write(kimi, {"added_tokens_decoder": tokens})
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json has an 'added_tokens_decoder' that is not tokens by number"
    ):
        convert(kimi)
