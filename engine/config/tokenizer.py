"""Whether a model's tokenizer is one for it, by ``tokenizer.json``, which gateways read."""

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
