"""Text to token ids and back, from a model directory's ``tokenizer.json``. Needs neither torch nor transformers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import tokenizers.decoders

from kvrelay.common.errors import ModelError
from kvrelay.gateway.errors import InvalidRequestError

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 4  # a character has at most four bytes, and a token at least one


class Detokenizer:
    """Turns one sequence's output into text as it arrives. It never sends half a character; the pieces add up to the whole text.

    A token's text can depend on the tokens before it (leading spaces, bytes of one character spread over tokens). So a piece is the
    text of a short window of ids, minus the part that was sent. A window that ends in an unfinished character waits for the rest,
    but only as long as a character can be: bytes that never become a character are sent as U+FFFD, and no window grows with the
    text.

    The tokens of many models are plain bytes. A token that consists of whole characters then adds its own text, whatever came
    before it, and no window is decoded. Decoding windows twice per token would take a sixth of the gateway's time per token.

    ``decode`` turns ids into text. ``silent_ids`` have no text, whatever ``decode`` makes of them.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent_ids: Collection[int] = (),
        *,
        text_of: Callable[[int], str] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """``text_of``: the text of one token, for tokenizers whose tokens are bytes. None: they are not.

        ``prompt``: the tokens whose text goes on. Many tokenizers drop a space at the beginning of a text, which the first
        output token is not.
        """
        self._decode = decode
        self._text_of = text_of
        self._silent_ids = frozenset(silent_ids)
        # The tokens that the next piece depends on.
        self._window = [one for one in prompt[-_MAX_HELD_TOKENS:] if text_of is None and one not in self._silent_ids]
        self._num_sent_chars = len(decode(self._window)) if self._window else 0  # of the window's text
        self._num_held = 0  # tokens since the last piece that ended with a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add, as far as it is certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._silent_ids])

    def finish(self) -> str:
        """The rest of the text at the end. An unfinished character is dropped."""
        text = self._decode(self._window).rstrip(_REPLACEMENT)[self._num_sent_chars :]
        self._window, self._num_sent_chars, self._num_held = [], 0, 0
        return text

    def _push_one(self, token_id: int) -> str:
        if self._text_of is not None and self._num_held == 0 and _REPLACEMENT not in (own := self._text_of(token_id)):
            if self._window:
                self._window, self._num_sent_chars = [], 0  # whole characters: later tokens do not depend on them
            return own
        self._window.append(token_id)
        self._num_held += 1
        text = self._decode(self._window)
        is_unfinished = text.endswith(_REPLACEMENT)
        if is_unfinished:
            text = text[:-1]
        has_waited = self._num_held > _MAX_HELD_TOKENS
        if not has_waited and (is_unfinished or len(text) <= self._num_sent_chars):
            return ""
        piece = text[self._num_sent_chars :]
        # The tokens of this piece are context for the next one; older ones no longer matter.
        del self._window[: -min(self._num_held, _MAX_HELD_TOKENS)]
        self._num_sent_chars = len(self._decode(self._window)) - is_unfinished
        if not is_unfinished:
            self._num_held = 0
        return piece


def _byte_names() -> dict[str, int]:
    """The byte that each character stands for in the names of tokens that are bytes (GPT-2's ``bytes_to_unicode``)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these stand for themselves
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_names()
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")  # in vocabularies of SentencePiece's kind

T = TypeVar("T")

_LONG = 4_000  # bytes of text that take about 1 ms


class Tokenizer:
    """A model's tokenizer with its special tokens and end-of-text ids. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], eos_ids: tuple[int, ...]) -> None:
        # A file may ask for truncation or padding, which is for training. A prompt must never be cut silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.skipped_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )  # ``decode`` leaves these out
        self.special_tokens = special_tokens  # such as {"bos_token": "<s>"}
        self.eos_ids = eos_ids
        # Every token of every output is also decoded on its own (see Detokenizer). The cache has at most as many entries as
        # there are ids.
        self._token_texts: dict[int, str] = {}
        self._decodes_bytes = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and its neighbours. Raises ModelError that names the file and the way out.

        As in transformers 5, only ``tokenizer.json`` says which special tokens ``encode`` adds: ``add_bos_token`` and
        ``add_eos_token`` beside it are ignored.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory} has no tokenizer.json; make one with transformers: "
                f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        config = read_json(directory / "tokenizer_config.json")
        special = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))
        }
        eos_ids: list[int] = []
        for source in (read_json(directory / "generation_config.json"), read_json(directory / "config.json")):
            value = source.get("eos_token_id")
            eos_ids += [value] if isinstance(value, int) else (value or [])
        if "eos_token" in special:
            token_id = backend.token_to_id(special["eos_token"])
            eos_ids += [] if token_id is None else [token_id]
        return cls(backend, special, tuple(dict.fromkeys(eos_ids)))

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Encode long texts on a thread: the library releases the interpreter's lock."""
        # The library's ``encode`` would keep the interpreter's lock.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def spans(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """Like ``encode``, but each token has its id and its begin and end in ``text`` (in characters)."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        # One by one, because making all offsets at once would not let other threads run.
        places = (encoding.token_to_chars(index) or (0, 0) for index in range(len(encoding)))
        return [(token_id, *place) for token_id, place in zip(encoding.ids, places, strict=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        if len(token_ids) == 1:
            return self.token_text(token_ids[0])
        text: str = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)[0]
        return text

    def detokenizer(self, silent_ids: Collection[int] = (), prompt: Sequence[int] = ()) -> Detokenizer:
        """For one sequence's output, special tokens included, but for ``silent_ids``. ``prompt``: as for :class:`Detokenizer`."""
        text_of = self.token_text if self._decodes_bytes else None
        return Detokenizer(self.decode_all, silent_ids, text_of=text_of, prompt=prompt)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as ``<tool_call>``; None if there is none."""
        return self._backend.token_to_id(token)

    def token_name(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, such as ``Ġthe``; empty if there is no such id."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone, which may be a part of a character."""
        text, name = self.token_text(token_id), self.token_name(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        if self._decodes_bytes and _BYTES.keys() >= set(name):
            return bytes(map(_BYTES.__getitem__, name))
        return bytes.fromhex(match[1]) if (match := _BYTE_NAME.fullmatch(name)) else text.encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises ModelError if it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _content(token: Any) -> str:
    """A special token's text; empty for a value that is no token, such as the switch ``add_bos_token``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def check_text(text: str, param: str) -> None:
    """Raises InvalidRequestError on text that is not valid Unicode: JSON escapes can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds half of a surrogate pair (character {error.start}): not valid Unicode", param=param
        ) from error


async def aside(work: Callable[[], T], size: int) -> T:
    """Run ``work`` on ``size`` bytes of a client's data. Large work runs on a thread, so that no stream waits for it."""
    return work() if size < _LONG else await asyncio.to_thread(work)
