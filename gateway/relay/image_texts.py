"""What prompts have in the place of images, also while every worker that could tell is away.

All workers that read images (:mod:`kvrelay.gateway.workers.images`) may be away: they start, restart or are lost.
Then requests with images wait beside the line (:mod:`kvrelay.gateway.routing.admission`), at most as long as others do in it. They
go on when a worker that reads images is up, or end when it turns out that none does. Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageTexts
from kvrelay.gateway.errors import AttemptsFailedError, InvalidRequestError, RequestTimeoutError
from kvrelay.gateway.routing.admission import Admission
from kvrelay.gateway.routing.asked import Asked
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.images import ImageAsker, Readers, Sizes
from kvrelay.gateway.workers.pool import WorkerPool

_NUMBERED = re.compile(r"image (\d{1,4})\b")
_HURRY_S = 0.5  # how often a link to a worker that somebody waits for is tried again
_MAX_WAITING_BYTES = 256 * 2**20  # of the files that wait; a gateway also holds the bodies that they came in


class ReaderAwayError(Exception):
    """A request with images can have no place: all workers that read them are away."""


@dataclass(slots=True)
class Patience:
    """In whose name somebody waits before there is a request, how long, and with what."""

    flow: Flow = field(default_factory=Flow)
    timeout_s: float = float("inf")  # of the whole request
    num_bytes: int = 0  # of the images' files
    waited_s: float = 0.0  # filled in: how long it waited for a worker
    spent_s: float = 0.0  # filled in: the time of fetching images, and of asking workers about them

    @property
    def left_s(self) -> float:
        """What is left of its time."""
        return self.timeout_s - self.waited_s - self.spent_s


def unreadable(detail: str, params: Sequence[str]) -> InvalidRequestError:
    """The error of images that a worker could not read. ``detail`` may begin with the number of one, such as ``image 2 cannot …``.

    ``params``: the client's fields that they came in.
    """
    found = _NUMBERED.match(detail)
    number = 0 if found is None else int(found[1])
    if number >= len(params):
        return InvalidRequestError(detail)
    if found is None:
        return InvalidRequestError(detail, param=field_of(params))
    return InvalidRequestError(f"{params[number]}{detail[found.end() :]}", param=params[number])


def field_of(params: Sequence[str]) -> str:
    """The field of an image, or that of several images, of which nobody knows which one is meant."""
    return params[0] if len(params) == 1 else params[0].partition("[")[0]


class ImageDesk:
    """Tells what prompts of one model have in the place of images, and waits for a worker that can tell."""

    def __init__(self, pool: WorkerPool, settings: RelaySettings, admission: Admission) -> None:
        self._asker = ImageAsker(pool)
        self._pool = pool
        self._settings = settings
        self._admission = admission
        self._num_waiting = 0
        self._hurrying: asyncio.TimerHandle | None = None  # while somebody waits

    @property
    def is_away(self) -> bool:
        """Whether no worker that reads images is up, and one may come back."""
        return self._asker.readers is Readers.AWAY

    def check(self, model: str) -> None:
        """Raises InvalidRequestError if the model reads no images. ``model``: its name; "": it is the only one."""
        self._asker.check(model)

    async def texts(self, sizes: Sizes, model: str, param: str, patience: Patience | None = None) -> ImageTexts:
        """What a prompt has in the place of images of these sizes, in order. Waits for a worker that can tell.

        ``model`` and ``param``: the model's name, and the first image's place in the body, for errors. ``patience``: of who asks.
        Raises InvalidRequestError if the model reads no images, or none of these. Raises OverloadedError or RequestTimeoutError if
        no worker came up in time. Raises UnavailableError if none answers, and AttemptsFailedError if one after the other was lost.
        """
        patience = patience or Patience()
        patience.timeout_s = min(patience.timeout_s, self._settings.request_timeout_s)
        num_lost = 0
        while True:
            asked = Asked(0, 0, flow=patience.flow, waited_s=patience.waited_s, spent_s=patience.spent_s)
            try:
                await self.come_up(asked, patience.left_s, patience.num_bytes, model)
            finally:
                patience.waited_s = asked.waited_s
            if (told := await self._ask(sizes, model, param, patience)) is not None:
                return told
            num_lost += 1
            if num_lost >= self._settings.max_attempts:
                raise AttemptsFailedError(
                    f"model {model!r}: {num_lost} times a worker was lost that was asked how to read the images; try again",
                    retry_after_s=1.0,
                )

    async def _ask(self, sizes: Sizes, model: str, param: str, patience: Patience) -> ImageTexts | None:
        """As ``ImageAsker.texts``. The time counts as spent. Raises RequestTimeoutError if no more is left."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with asyncio.timeout(patience.left_s):
                return await self._asker.texts(sizes, model, param)
        except TimeoutError:
            raise RequestTimeoutError(
                f"{f'model {model!r}: ' if model else ''}no worker told how to read the images within the request's "
                f"{patience.timeout_s:g} s; give it more time"
            ) from None
        finally:
            patience.spent_s += loop.time() - begun_s

    async def come_up(self, asked: Asked, timeout_s: float, num_bytes: int, model: str) -> None:
        """Wait while all workers that read images are away; otherwise return at once. ``num_bytes``: of the files that wait.

        ``timeout_s``: of the rest of the request. Adds the time to ``asked.waited_s``. Raises OverloadedError and
        RequestTimeoutError.
        """
        if not self.is_away:
            return
        asked.num_bytes = num_bytes
        missing = "no worker that reads images is up"
        self._num_waiting += 1
        if self._hurrying is None:
            self._hurry()
        try:
            await self._admission.wait_beside(
                lambda: not self.is_away,
                asked,
                timeout_s,
                lambda: f"model {model!r}: {missing}" if model else missing,
                _MAX_WAITING_BYTES,
            )
        finally:
            self._num_waiting -= 1

    def _hurry(self) -> None:
        """Have links tried again as long as somebody waits."""
        self._hurrying = None
        if self._num_waiting:
            self._pool.hurry(self._pool.image_workers)
            self._hurrying = asyncio.get_running_loop().call_later(_HURRY_S, self._hurry)
