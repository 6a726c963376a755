"""Whether a model's tokenizer is one for it, or another model's, by ``tokenizer.json``, which gateways read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raises ModelError on a vocabulary with tokens that the model has no embedding of.

    Added tokens may lie beyond: some models have one for images that their text model never sees. A request that holds such a token
    is refused. A directory without a tokenizer.json passes: an engine needs none.
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
    """A vocabulary lists its tokens in order (Unigram), or says the id of each."""
    if isinstance(vocab, list):
        return len(vocab) - 1
    return max(map(int, vocab.values()), default=-1)


def require_same_tokens(directory: Path, other: Path) -> None:
    """Raise ModelError unless the models of both directories have the same tokens under the same numbers.

    Their embeddings may have more rows, as some are filled up to a round number.
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
