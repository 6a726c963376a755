"""The bytes of every token of a model, as grammars need them, read from its ``tokenizer.json``.

Special tokens are not text, so no grammar may take them for the text that names them. Their names stand behind a byte that no text
has: a structural tag can ask for one of them by its id, and only what takes any byte, such as a structural tag's free text, matches
it beside that. (With no bytes at all, nothing would match it.) What ends the text gets no bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError

_SPECIAL = b"\xff"  # in no UTF-8
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_vocabulary(directory: Path, vocab_size: int) -> tuple[list[bytes], int]:
    """Each token's bytes, ``[vocab_size]``, and a token that ends the text. Raises ModelError if the files do not tell.

    ``vocab_size``: the width of the model's logits, which may be padded; what the tokenizer does not have is empty.
    """
    path = directory / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        pieces = _pieces(tokenizer["model"]["vocab"])
        added = {int(token["id"]): token for token in tokenizer.get("added_tokens") or ()}
        kinds = set(_types(tokenizer.get("decoder")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} does not tell the tokens' text: {error!r}") from error
    decode = _byte_level if "ByteLevel" in kinds else _with_byte_pieces if "ByteFallback" in kinds else str.encode
    vocabulary = [b""] * vocab_size
    for token_id, piece in pieces.items():
        if token_id < vocab_size:
            vocabulary[token_id] = decode(piece)
    ends = _end_tokens(directory)
    for token_id, token in added.items():
        if token_id < vocab_size:
            vocabulary[token_id] = (_SPECIAL if token.get("special") else b"") + str(token["content"]).encode()
    for token_id in ends:
        if 0 <= token_id < vocab_size:
            vocabulary[token_id] = b""
    special = [token_id for token_id, token in added.items() if token.get("special")]
    unused = (token_id for token_id, piece in enumerate(vocabulary) if not piece)
    end = next((token_id for token_id in (*ends, *special, *unused) if 0 <= token_id < vocab_size), None)
    if end is None:
        raise ModelError(f"{path} has no special token: nothing could end a text that matches a grammar")
    vocabulary[end] = b""
    return vocabulary, end


def _pieces(vocab: Any) -> dict[int, str]:
    if isinstance(vocab, dict):
        return {int(token_id): piece for piece, token_id in vocab.items()}
    return {token_id: piece for token_id, (piece, _) in enumerate(vocab)}  # a unigram model's, with scores


def _types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _types(inner)


def _end_tokens(directory: Path) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            end = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        found += end if isinstance(end, list) else [] if end is None else [end]
    return list(dict.fromkeys(found))


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that are print themselves, the others 256 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def _byte_level(piece: str) -> bytes:
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode()  # an added token, spelled as it is


def _with_byte_pieces(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()
