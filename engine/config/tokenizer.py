"""Checks that a model directory's ``tokenizer.json``, which gateways read, belongs to the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raises ModelError if the vocabulary has tokens that the model has no embedding for.

    Added tokens may be beyond: some models have an image token that their text model never sees. Requests with such a token are
    refused. A directory without a tokenizer.json passes, because an engine needs none.
    """
    path = directory / "tokenizer.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        largest = _largest_id(model["vocab"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read ({error!r}): fetch it again") from error
    if largest >= vocab_size:
        raise ModelError(
            f"{path} has token {largest}, but the model has {vocab_size} tokens by config.json: it is another model's tokenizer"
        )


def _largest_id(vocab: Any) -> int:
    """The largest id. A vocabulary lists its tokens in order (Unigram), or gives each token's id."""
    if isinstance(vocab, list):
        return len(vocab) - 1
    return max(map(int, vocab.values()), default=-1)


def require_same_tokens(directory: Path, other: Path) -> None:
    """Raise ModelError unless the models of both directories have the same tokens with the same ids.

    Their embeddings may have different numbers of rows, because some are padded to a round number.
    """
    tokens, others = _tokens(directory), _tokens(other)
    if tokens == others:
        return
    first = min(tokens.items() ^ others.items())[0]
    raise ModelError(
        f"{directory} and {other} have different tokens, {len(tokens)} and {len(others)} of them: token {first} is "
        f"{tokens.get(first)!r} and {others.get(first)!r}"
    )


def _tokens(directory: Path) -> dict[int, str]:
    path = directory / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):
            tokens = {number: str(entry[0]) for number, entry in enumerate(vocab)}
        else:
            tokens = {int(number): token for token, number in vocab.items()}
        return tokens | {int(added["id"]): added["content"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path} cannot be read ({error!r}); by it the tokens of two models are compared") from error
