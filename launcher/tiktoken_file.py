"""Makes a ``tokenizer.json`` of a ``tiktoken.model``, for Kimi and Moonlight, whose tokenizers come as Python code.

No code of a checkpoint runs. A file of tiktoken holds tokens with their ranks: of two neighbours, those are merged first whose
joined token has the lowest rank. How text is split before that is in the checkpoint's Python code. All checkpoints of Moonshot
share one expression, which is here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvrelay.common.errors import ModelError
from kvrelay.launcher.atomic_dir import build_once
from kvrelay.launcher.progress import announce

RANKS = "tiktoken.model"
_CONFIG, _RESULT = "tokenizer_config.json", "tokenizer.json"
_CLASSES = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
_NUM_RESERVED = 256  # special tokens behind the ranks; those that the config does not name are reserved
_VERSION = "1"  # raise when the result of a conversion changes
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is split before merging, in the notation of both tiktoken and ``tokenizers``. Source: ``tokenization_kimi.py``."""


def has_tokenizer(directory: Path) -> bool:
    """Whether a model directory has a tokenizer that can be served: a ``tokenizer.json``, or what one can be made of."""
    return (directory / _RESULT).is_file() or _is_convertible(directory)


def with_tokenizer(directory: Path, cache: Path) -> Path:
    """``directory``, if it has a ``tokenizer.json``. Else a directory of the same name in ``cache``, with links to its files and a
    ``tokenizer.json``, made at the first call.

    Call it if ``has_tokenizer``. Raises ModelError if the files cannot be read, or the cache cannot be written.
    """
    if (directory / _RESULT).is_file():
        return directory
    files = sorted(directory.iterdir())
    key = hashlib.sha256(f"{_VERSION} {directory} {[path.name for path in files]}".encode())
    for name in (RANKS, _CONFIG):
        key.update((directory / name).read_bytes())
    place = cache / f"tokenizer-{key.hexdigest()[:12]}" / directory.name

    def build(temporary: Path) -> None:
        for path in files:
            (temporary / path.name).symlink_to(path)
        with announce(f"making a {_RESULT} of {directory / RANKS} (once)"):
            convert(directory).save(str(temporary / _RESULT))

    try:
        return build_once(place, build)
    except OSError as error:
        raise ModelError(
            f"cannot keep the {_RESULT} of {directory} in {place}: {error}; set XDG_CACHE_HOME to another place"
        ) from error


def convert(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a directory with ranks. Raises ModelError naming a file that cannot be read."""
    ranks, config = _ranks(directory / RANKS), _config(directory)
    names = {bytes([byte]): name for byte, name in zip(_byte_order(), _byte_names(), strict=True)}

    def name_of(token: bytes) -> str:
        return "".join([names[token[place : place + 1]] for place in range(len(token))])

    vocab = {name_of(token): rank for token, rank in ranks.items()}
    merges = [(name_of(left), name_of(right)) for left, right in _merges(ranks)]
    # tiktoken takes a whole piece of text first, if it is a token.
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    try:
        added = _added(config, len(ranks))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory / _CONFIG} has an 'added_tokens_decoder' that is not tokens by number ({error!r}); fetch it again"
        ) from error
    made.add_tokens(added)
    for number, token in enumerate(added, start=len(ranks)):
        if made.token_to_id(token.content) != number:
            raise ModelError(
                f"{directory / _CONFIG} has token {token.content!r} as {number}, and a second time; fetch it again"
            )
    return made


def _is_convertible(directory: Path) -> bool:
    if not (directory / RANKS).is_file() or not (directory / _CONFIG).is_file():
        return False
    automatic = _config(directory).get("auto_map")
    found = automatic.get("AutoTokenizer") if isinstance(automatic, dict) else None
    return any(one in _CLASSES for one in (found if isinstance(found, list) else [found]))


def _config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object; fetch it again")
    return config


def _ranks(path: Path) -> dict[bytes, int]:
    """Tokens with their ids, in order, from lines of base64 and a number."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    if list(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path} does not number its tokens from 0 on, or lacks a byte; fetch it again")
    return ranks


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs that make a token, in the order in which tiktoken merges them."""
    for token in ranks:
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _added(config: dict[str, Any], first: int) -> list[tokenizers.AddedToken]:
    """The tokens behind the ranks, in order."""
    named = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    added = []
    for number in range(first, max([first + _NUM_RESERVED, *(one + 1 for one in named)])):
        token = named.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "special")}
        added.append(tokenizers.AddedToken(token["content"], normalized=False, **flags))
    return added


def _byte_order() -> list[int]:
    """Bytes in the order of their names: first those that are printable characters."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return shown + [byte for byte in range(0x100) if byte not in shown]


def _byte_names() -> list[str]:
    """Characters that stand for bytes in vocabularies (GPT-2's ``bytes_to_unicode``)."""
    shown = _byte_order()[:188]
    return [*map(chr, shown), *(chr(0x100 + place) for place in range(0x100 - len(shown)))]
