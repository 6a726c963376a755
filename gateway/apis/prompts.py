"""A chat of any API as tokens. If it has images, a prefill worker is asked what stands in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from kvrelay.common.images import ImageTexts
from kvrelay.gateway.chat.dialect import Chat
from kvrelay.gateway.chat.image_prompt import Prompt, placed, with_texts
from kvrelay.gateway.model import Model
from kvrelay.gateway.text.tokenizer import aside

T = TypeVar("T")

Encode = Callable[[str], list[int]]
"""Makes a prompt's text tokens. Raises InvalidRequestError."""
CheckSize = Callable[[int], None]


async def prompt_of(
    model: Model, read: Callable[[], tuple[Chat, T]], encode: Encode, size: int, check_size: CheckSize = lambda _: None
) -> tuple[Chat, T, Prompt]:
    """The chat and the rest that ``read`` makes of a body of ``size`` bytes, and the chat's tokens.

    Work on a large body runs on a thread. ``check_size`` gets the size of the body without its images. Raises InvalidRequestError,
    UnavailableError if no worker can be asked about images, and what ``check_size`` raises.
    """

    def work() -> tuple[Chat, T, list[int]]:
        chat, rest = read()
        check_size(size_without_images(size, chat))
        return chat, rest, [] if chat.images else encode(chat.prompt)

    chat, rest, token_ids = await aside(work, size)
    # A stream keeps its chat, and the client's messages would stay with it.
    kept = dataclasses.replace(chat, given={})
    if not chat.images:
        return kept, rest, Prompt(token_ids)
    told = await image_texts(model, chat)

    def place() -> Prompt:
        token_ids = encode(text_of_chat(model, chat, told))
        return Prompt(token_ids, () if told is None else placed(token_ids, chat.images, told))

    return kept, rest, await aside(place, size)


async def image_texts(model: Model, chat: Chat) -> ImageTexts | None:
    """What the chat's prompt has in the place of its images; None if it has none.

    Raises InvalidRequestError if the model cannot read them, and UnavailableError if no worker can be asked.
    """
    if not chat.images:
        return None
    sizes = tuple(image.size for image in chat.images)
    return await model.relay.images.texts(sizes, model.name, chat.images[0].param)


def text_of_chat(model: Model, chat: Chat, told: ImageTexts | None) -> str:
    """The chat's prompt as text, with ``told`` in the place of its images. Raises InvalidRequestError."""
    if told is None:
        return chat.prompt
    if chat.refusal is not None:
        raise chat.refusal
    return with_texts(chat.prompt, told, chat.given, model.tokenizer.token_text(told.placeholder))


def size_without_images(size: int, chat: Chat) -> int:
    """What a body of ``size`` bytes has beside the chat's images, which it has in base64."""
    return size - sum((len(image.data) + 2) // 3 * 4 for image in chat.images)
