"""Log probabilities by token text, and by token id where several tokens have the same text."""

from __future__ import annotations

import math
from pathlib import Path

from kvrelay.common.sampling import SampledToken
from kvrelay.gateway.apis.openai.completion_answer import chat_logprobs, text_logprobs
from kvrelay.gateway.text.tokenizer import Tokenizer


def half_characters(tokenizer: Tokenizer) -> tuple[int, int]:
    """Two tokens with the same text, because each is a part of a character."""
    first, second = [one for one in range(tokenizer.vocab_size) if tokenizer.token_text(one) == "\ufffd"][:2]
    return first, second


def test_tokens_of_one_text_stay_apart_by_their_ids(model_directory: Path) -> None:
    tokenizer = Tokenizer.load(model_directory)
    first, second = half_characters(tokenizer)
    tokens = [SampledToken(first, -0.5, ((first, -0.5), (second, -math.inf)))]
    by_text = text_logprobs(tokenizer, tokens, 3)
    assert by_text["tokens"] == ["\ufffd"]
    assert by_text["top_logprobs"] == [{"\ufffd": -9999.0}]  # OpenAI's form can hold only one of them
    by_id = text_logprobs(tokenizer, tokens, 3, ids_as_tokens=True)
    assert by_id["tokens"] == [f"token_id:{first}"]
    assert by_id["top_logprobs"] == [{f"token_id:{first}": -0.5, f"token_id:{second}": -9999.0}]
    assert by_id["text_offset"] == [3]


def test_a_chats_tokens_by_their_ids(model_directory: Path) -> None:
    tokenizer = Tokenizer.load(model_directory)
    first, second = half_characters(tokenizer)
    tokens = [SampledToken(first, -0.5, ((second, math.nan),))]
    (entry,) = chat_logprobs(tokenizer, tokens, ids_as_tokens=True)["content"]
    assert entry["token"] == f"token_id:{first}"
    assert entry["bytes"] == [ord(tokenizer.token_name(first))], "OpenAI's clients put the bytes together to characters"
    assert [top["token"] for top in entry["top_logprobs"]] == [f"token_id:{second}"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-9999.0]  # NaN is no JSON
