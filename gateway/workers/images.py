"""Asks workers what prompts have in the place of images, and remembers their answers.

An answer depends on nothing but the model and the images' sizes, so it is remembered by sizes, as long as the worker process that
gave it is in use. Only workers that are up are asked: :mod:`kvrelay.gateway.relay.image_texts` waits for others. Lives on the
gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import OrderedDict
from dataclasses import dataclass

from kvrelay.common.images import ImageTexts
from kvrelay.gateway.errors import InvalidRequestError, UnavailableError
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import ImagesTold, Role, Welcome

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


class Readers(enum.Enum):
    """What there is of workers that read images."""

    UP = "one may be asked"
    AWAY = "one that starts, restarts, ends or is lost may come back, or one has not answered yet"
    NONE = "the model reads no images with the workers that there are"


class ImageAsker:
    """What stands in the place of images, in the prompts of one pool's model."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._answers: OrderedDict[Sizes, _Answer] = OrderedDict()  # least recently used first
        self._num_chars = 0
        self._number = 0

    @property
    def readers(self) -> Readers:
        """What there is of workers that read images."""
        if self._pool.image_readers:
            return Readers.UP
        return Readers.NONE if self._reads_none else Readers.AWAY

    def check(self, model: str, param: str | None = None) -> None:
        """Raises InvalidRequestError if the model reads no images, with the reason. ``model``: its name; "": it is the only one."""
        if self.readers is Readers.NONE:
            name = f"model {model!r}" if model else "the model"
            raise InvalidRequestError(f"{name} reads no images: {self._reads_none}; send text only", param=param)

    async def texts(self, sizes: Sizes, model: str, param: str) -> ImageTexts | None:
        """What a prompt has in the place of images of these sizes, in order. None if no worker is up, or if one was lost meanwhile.

        ``model`` and ``param``: the name of the model, and the first image's place in the body, for errors. Raises
        InvalidRequestError if the model reads no images, or none of these. Raises UnavailableError if workers are up and none
        answers.
        """
        self.check(model, param)
        known = self._answers.get(sizes)
        if known is not None and known.counts:
            self._answers.move_to_end(sizes)
            return known.told
        usable = self._pool.image_readers
        self._number += 1
        first = self._number % max(1, len(usable))  # another one each time
        is_one_lost = not usable
        for worker in usable[first:] + usable[:first]:
            welcome = worker.welcome
            answer = await _ask(worker, sizes)
            if answer is None or welcome is None:
                stays = worker.welcome is welcome and worker in self._pool.image_readers
                is_one_lost = is_one_lost or not stays
                continue
            if answer.problem:
                raise InvalidRequestError(answer.problem, param=param)
            told = answer.told
            # A worker of another version might tell something that cannot be used.
            if told is not None and told.mark and len(told.texts) == len(sizes):
                self._remember(sizes, _Answer(told, worker, welcome))
                return told
        if is_one_lost:
            return None
        raise UnavailableError(
            f"model {model!r}: no worker tells how to read the images; try again later", retry_after_s=1.0
        )

    @property
    def _reads_none(self) -> str:
        """Why no worker that there is reads images. Empty if one does, or may: when it comes back, or first answers."""
        workers = self._pool.image_workers
        if any(worker.read_images or not (worker.has_answered or worker.is_retiring) for worker in workers):
            return ""
        role = (
            Role.PREFILL if self._pool.knows_prefill_workers else Role.DECODE
        )  # those of a cluster may all be starting
        fitting = [worker.welcome for worker in workers if worker.role is role and not worker.misfit]
        return "; ".join(sorted({welcome.card.no_images for welcome in fitting if welcome is not None}))

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
