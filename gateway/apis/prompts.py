"""A chat of any API as tokens. If it has images, a worker is asked what stands in their places."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.common.images import ImageTexts
from kvrelay.gateway.chat.dialect import Chat
from kvrelay.gateway.chat.image_fetch import ImageFetcher
from kvrelay.gateway.chat.image_prompt import Prompt, placed, with_texts
from kvrelay.gateway.chat.images import ChatImage, ImageLink, with_files
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.model import Model
from kvrelay.gateway.relay.image_texts import Patience, field_of
from kvrelay.gateway.text.tokenizer import aside
from kvrelay.wire.codec import MAX_IMAGES_NBYTES

T = TypeVar("T")

Encode = Callable[[str], list[int]]
"""Makes a prompt's text tokens. Raises InvalidRequestError."""


async def prompt_of(
    model: Model,
    read: Callable[[], tuple[Chat, T]],
    encode: Encode,
    size: int,
    request: ApiRequest | None = None,
    patience: Patience | None = None,
) -> tuple[Chat, T, Prompt]:
    """The chat and the rest that ``read`` makes of a body of ``size`` bytes, and the chat's tokens.

    ``request``: whose body it is. None: it came by no HTTP, and for workers that read no images. ``patience``: as of
    :func:`image_texts`. Work on a large body runs on a thread. Raises InvalidRequestError, BodyTooLargeError, and what ``files_of``
    and ``image_texts`` raise.
    """

    def work() -> tuple[Chat, T, list[int]]:
        chat, rest = read()
        if request is not None:
            request.check_size(size_without_images(size, chat))
        return chat, rest, [] if chat.images else encode(chat.prompt)

    chat, rest, token_ids = await aside(work, size)
    # A stream keeps its chat, and the client's messages would stay with it.
    kept = dataclasses.replace(chat, given={})
    if not chat.images:
        return kept, rest, Prompt(token_ids)
    patience = patience or Patience()
    images = await files_of(model, chat, request, patience)
    told = await image_texts(model, images, patience)

    def place() -> Prompt:
        token_ids = encode(text_of_chat(model, chat, told))
        return Prompt(token_ids, () if told is None else placed(token_ids, images, told))

    return kept, rest, await aside(place, max(size, sum(len(image.data) for image in images)))


async def files_of(model: Model, chat: Chat, request: ApiRequest | None, patience: Patience) -> Sequence[ChatImage]:
    """The chat's images. Those that are on the web are fetched, once all else of the request that can be checked is right.

    ``patience``: as of :func:`image_texts`. Raises InvalidRequestError naming an image that cannot be had, TokenBudgetError if
    nothing could be generated, what ``image_texts`` raises, and what ``ImageFetcher.fetch`` raises.
    """
    links = [image for image in chat.images if isinstance(image, ImageLink)]
    own = [image for image in chat.images if isinstance(image, ChatImage)]
    if not links:
        return own
    if request is not None:
        _fetcher(request).check(links)
        request.check_budget()
    # Their sizes are not known. But it raises if the model reads no images.
    patience.num_bytes = sum(len(image.data) for image in own)
    await model.relay.images.texts((), model.name, links[0].param, patience)
    if chat.refusal is not None:
        raise chat.refusal
    assert request is not None, "workers that read no images answer no question about them"
    begun_s = time.monotonic()
    try:
        left = MAX_IMAGES_NBYTES - sum(len(image.data) for image in own)
        files = await _fetcher(request).fetch(links, left, patience.left_s)
    finally:
        ended_s = time.monotonic()
        request.fetching_s = begun_s, ended_s
        patience.spent_s += ended_s - begun_s
    return await aside(lambda: with_files(chat.images, files), sum(map(len, files)))


def _fetcher(request: ApiRequest) -> ImageFetcher:
    fetcher: ImageFetcher = request.app.state.image_fetcher
    return fetcher


async def image_texts(model: Model, images: Sequence[ChatImage], patience: Patience) -> ImageTexts | None:
    """What a prompt has in the place of its images; None if there are none. Waits for a worker that can tell.

    ``patience``: how long, and in whose name; it gets the time that was waited. Raises InvalidRequestError if the model cannot read
    the images. Raises UnavailableError, RequestTimeoutError or AttemptsFailedError if no worker tells.
    """
    if not images:
        return None
    sizes = tuple(image.size for image in images)
    patience.num_bytes = sum(len(image.data) for image in images)
    field = field_of([image.param for image in images])
    return await model.relay.images.texts(sizes, model.name, field, patience)


def text_of_chat(model: Model, chat: Chat, told: ImageTexts | None) -> str:
    """The chat's prompt as text, with ``told`` in the place of its images. Raises InvalidRequestError."""
    if told is None:
        return chat.prompt
    if chat.refusal is not None:
        raise chat.refusal
    return with_texts(chat.prompt, told, chat.given, model.tokenizer.token_text(told.placeholder))


def size_without_images(size: int, chat: Chat) -> int:
    """What a body of ``size`` bytes has beside the chat's images, which it has in base64."""
    return size - sum((len(image.data) + 2) // 3 * 4 for image in chat.images if isinstance(image, ChatImage))
