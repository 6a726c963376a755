"""A model's tokens in the form that grammars need.

Special tokens are not text. llguidance puts a byte before their names that no text has, so no grammar matches a name with the
token. A structural tag can ask for a special token by its id.
"""

from __future__ import annotations

import json
from pathlib import Path

import llguidance

from kvrelay.common.errors import ModelError


def load_vocabulary(directory: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """The tokens of the model in ``directory``, including an end token. Raises ModelError if its files do not have them.

    ``vocab_size``: the width of the model's logits, which may be padded.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist: nothing tells the tokens' text")
    try:
        end = next((token_id for token_id in _end_tokens(directory) if 0 <= token_id < vocab_size), None)
        vocabulary = llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=end)
        if end is not None:
            return vocabulary
        special = next((token_id for token_id in range(vocab_size) if vocabulary.is_special_token(token_id)), None)
        if special is None:
            raise ModelError(f"{path} has no special token: nothing could end a text that matches a grammar")
        return llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=special)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"{path} does not tell the tokens' text: {error}") from error


def special_ids(vocabulary: llguidance.LLTokenizer) -> dict[str, int]:
    """The ids of special tokens by name."""
    ids = [token_id for token_id in range(vocabulary.vocab_size) if vocabulary.is_special_token(token_id)]
    return {vocabulary.decode_bytes([token_id]).decode(errors="replace"): token_id for token_id in ids}


def _end_tokens(directory: Path) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            end = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        found += end if isinstance(end, list) else [] if end is None else [end]
    return found
