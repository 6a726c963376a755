"""Images for tests, and a model that reads them: its files, and a prefill worker that tells what stands in their places."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from kvrelay.common.images import ImageText, ImageTexts
from kvrelay.common.model_card import ModelCard
from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.messages import AskImages, ImagesTold

from ..tokenizer_files import save_tokenizer
from .players import Player

MARK, PAD, BEGIN, END = "<image>", "<pad>", "<begin>", "<end>"
SPECIAL = ["<eos>", "<user>", MARK, PAD, BEGIN, END]
PAD_ID = SPECIAL.index(PAD)
TEMPLATE = """{% for m in messages %}<user>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"""
VOCAB = 310


def picture(
    size: tuple[int, int] = (8, 6), kind: str = "PNG", colour: int = 0, orientation: int | None = None
) -> bytes:
    """A file with an image of one colour."""
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", size, (colour, colour, colour)).save(file, kind, exif=exif)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{in_base64(data)}"


def part(data: bytes, **more: Any) -> dict[str, Any]:
    """A part of OpenAI's chats."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def num_pads(size: tuple[int, int]) -> int:
    """The placeholders of an image."""
    return 1 + (size[0] + 2 * size[1]) % 7


def text_of(size: tuple[int, int]) -> ImageText:
    """Some placeholders in two rows, as models have them."""
    number = num_pads(size)
    rows = [PAD * (number // 2), PAD * (number - number // 2)]
    return ImageText(BEGIN + "\n".join(row for row in rows if row) + END, number)


def texts_of(sizes: Sequence[tuple[int, int]]) -> ImageTexts:
    return ImageTexts(mark=MARK, placeholder=PAD_ID, texts=[text_of(size) for size in sizes])


def telling(player: Player, asked: AskImages) -> None:
    """A prefill worker's answer."""
    player.say(ImagesTold(query=asked.query, told=texts_of(asked.sizes)))


def seeing_card(no_images: str = "", num_blocks: int = 128) -> ModelCard:
    """The card of a worker that reads images, or does not for a reason."""
    return msgspec.structs.replace(fake_card(vocab_size=VOCAB, num_blocks=num_blocks), no_images=no_images)


def save_model(directory: Path) -> Path:
    """The files of a model that reads images."""
    text = "one relay hands the baton to the next one, and the next one runs"
    save_tokenizer(directory, VOCAB, SPECIAL, text, TEMPLATE)
    return directory
