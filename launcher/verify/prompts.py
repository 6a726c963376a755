"""The prompts of ``kvrelay verify``: lists of token ids, the same in every run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.common.errors import SettingsError

Encode = Callable[[str], list[int]]

# These lengths are around block borders (16) and chunk borders (512). The two tails get a shared prefix of 600 tokens.
_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 60, 100, 150, 255, 300, 511, 513, 2000)
_SHARED_LENGTH = 600
_TAIL_LENGTHS = (40, 70)

_SUBJECTS = ("The old lighthouse", "A careful engineer", "My neighbour's cat", "The night train", "Every third student")
_VERBS = ("remembers", "repairs", "describes", "carries", "measures", "forgets", "draws", "borrows")
_OBJECTS = ("the broken clock", "a map of the harbour", "seven letters", "the longest river", "two kinds of bread")
_PLACES = ("in the winter of 1987", "behind the library", "without a word", "for almost nine hours", "near the border")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as every side gets it."""

    name: str
    token_ids: tuple[int, ...]


def built_in_prompts(encode: Encode, max_tokens: int) -> list[Prompt]:
    """20 prompts of 1 to 2,000 tokens, none longer than ``max_tokens``. ``encode`` turns text into token ids."""
    prompts = [
        Prompt(f"{length} tokens", tuple(_tokens(encode, seed, length)))
        for seed, length in enumerate(min(length, max_tokens) for length in _LENGTHS)
    ]
    shared = _tokens(encode, 100, min(_SHARED_LENGTH, max(0, max_tokens - max(_TAIL_LENGTHS))))
    for seed, length in enumerate(_TAIL_LENGTHS, start=101):
        tail = _tokens(encode, seed, min(length, max_tokens - len(shared)))
        prompts.append(Prompt(f"{len(shared)} shared + {len(tail)}", (*shared, *tail)))
    return prompts


def prompts_from_file(path: Path, encode: Encode, max_tokens: int) -> list[Prompt]:
    """One prompt per JSON line ``{"prompt": "text"}``. Raises SettingsError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts: cannot read {path}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f'--prompts: line {number} of {path} is not an object with a "prompt"') from error
        if not isinstance(text, str) or not text:
            raise SettingsError(f"--prompts: the prompt in line {number} of {path} must be text, not {text!r}")
        token_ids = encode(text)
        if not 1 <= len(token_ids) <= max_tokens:
            raise SettingsError(
                f"--prompts: line {number} of {path} has {len(token_ids)} tokens; "
                f"it must have 1 to {max_tokens}, what the model's length leaves for a prompt"
            )
        prompts.append(Prompt(f"line {number}", tuple(token_ids)))
    if not prompts:
        raise SettingsError(f"--prompts: {path} has no prompts")
    return prompts


def tokenizer_of(directory: Path) -> Encode:
    """The model's tokenizer. It adds the model's special tokens, such as a beginning-of-sequence token."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where text is given

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def _tokens(encode: Encode, seed: int, length: int) -> Sequence[int]:
    """Exactly ``length`` tokens of plain, deterministic English."""
    chooser = random.Random(seed)  # noqa: S311 - the same text at every run is wanted
    words: list[str] = []
    ids: list[int] = []
    while len(ids) < length:
        for _ in range(max(1, length // 8)):
            parts = (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)
            words.append(" ".join(chooser.choice(part) for part in parts) + ".")
        ids = encode(" ".join(words))
    return ids[:length]
