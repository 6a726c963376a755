"""Asks prefill workers what prompts have in the place of images, and remembers their answers.

Only prefill workers read images. An answer depends on nothing but the model and the images' sizes, so it is remembered by sizes, as
long as the worker process that gave it is in use. Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass

from kvrelay.common.images import ImageTexts
from kvrelay.gateway.errors import InvalidRequestError, UnavailableError
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import ImagesTold, Welcome

Sizes = tuple[tuple[int, int], ...]  # widths and heights in pixels

_ANSWER_S = 30.0  # how long one worker may take: about a second for ten million pixels of new sizes
_MAX_ANSWERS = 1024
_MAX_CHARS = 16 * 2**20  # of all remembered answers: large images have texts of many thousand characters


@dataclass(frozen=True, slots=True)
class _Answer:
    told: ImageTexts
    worker: Worker
    welcome: Welcome  # of the process that gave it

    @property
    def counts(self) -> bool:
        """Whether the process that gave it is still in use. Another one may read images differently."""
        return self.worker.is_usable and self.worker.welcome is self.welcome

    @property
    def num_chars(self) -> int:
        return sum(len(text.text) for text in self.told.texts)


class ImageAsker:
    """What stands in the place of images, in the prompts of one pool's model."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._answers: OrderedDict[Sizes, _Answer] = OrderedDict()  # least recently used first
        self._num_chars = 0
        self._number = 0

    async def texts(self, sizes: Sizes, model: str, param: str) -> ImageTexts:
        """What a prompt has in the place of images of these sizes, in order.

        ``model`` and ``param``: the name of the model, and the first image's place in the body, for errors. Raises
        InvalidRequestError if the model reads no images, or none of these. Raises UnavailableError if no worker answers.
        """
        known = self._answers.get(sizes)
        if known is not None and known.counts:
            self._answers.move_to_end(sizes)
            return known.told
        for worker in self._readers(model, param):
            welcome = worker.welcome
            answer = await _ask(worker, sizes)
            if answer is None or welcome is None:
                continue
            if answer.problem:
                raise InvalidRequestError(answer.problem, param=param)
            told = answer.told
            # A worker of another version might tell something that cannot be used.
            if told is not None and told.mark and len(told.texts) == len(sizes):
                self._remember(sizes, _Answer(told, worker, welcome))
                return told
        raise UnavailableError(
            f"model {model!r}: no prefill worker tells how to read the images; try again later", retry_after_s=1.0
        )

    def _readers(self, model: str, param: str) -> list[Worker]:
        """The workers to ask, another one first each time. Raises InvalidRequestError and UnavailableError."""
        staying = [worker for worker in self._pool.prefills.values() if not worker.is_retiring]
        if not staying:
            raise _reads_none(model, "only prefill workers read images, and there is none", param)
        fitting = [worker for worker in staying if worker.welcome is not None and not worker.misfit]
        readers = [worker for worker in fitting if worker.reads_images]
        if fitting and not readers:
            reasons = {"" if worker.welcome is None else worker.welcome.card.no_images for worker in fitting}
            raise _reads_none(model, "; ".join(sorted(reasons)), param)
        usable = [worker for worker in readers if worker.is_usable]
        if not usable:
            self._pool.hurry(staying)
            raise UnavailableError(
                f"model {model!r}: no prefill worker that reads images is up; try again later", retry_after_s=1.0
            )
        self._number += 1
        first = self._number % len(usable)
        return usable[first:] + usable[:first]

    def _remember(self, sizes: Sizes, answer: _Answer) -> None:
        if (before := self._answers.pop(sizes, None)) is not None:
            self._num_chars -= before.num_chars
        self._answers[sizes] = answer
        self._num_chars += answer.num_chars
        while len(self._answers) > _MAX_ANSWERS or self._num_chars > _MAX_CHARS:
            _, oldest = self._answers.popitem(last=False)
            self._num_chars -= oldest.num_chars


async def _ask(worker: Worker, sizes: Sizes) -> ImagesTold | None:
    """The worker's answer; None if it is lost or too slow."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            return await worker.ask_images(sizes)
    return None


def _reads_none(model: str, reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"model {model!r} reads no images: {reason}; send text only", param=param)
