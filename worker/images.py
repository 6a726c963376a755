"""A worker's images: files become what the encoder takes, on threads beside the model's and the asyncio loop.

One prompt's images are read at a time, in the order of arrival. What was read may be many times as large as the files. So no more
is read while prompts that have not been computed hold a certain amount. Questions about sizes do not wait for that, and are
answered one at a time, too: those about few pixels first, as an answer may take a second for ten million of them.

Asyncio loop only, except for the reader's calls.
"""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvrelay.common.images import PromptImage, image_digest
from kvrelay.engine.images.interface import ImageError, ImageReader, ReadImages
from kvrelay.wire.codec import MAX_IMAGES_NBYTES
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.messages import AskImages, FailureCode, ImagesTold, Submit
from kvrelay.worker.submit import Refusal

logger = logging.getLogger(__name__)

_MAX_FILES_NBYTES = 8 * MAX_IMAGES_NBYTES  # of files that wait to be read; one more prompt is refused
_MAX_READ_NBYTES = 2**30  # of what was read and is not computed; beyond that only one prompt's images are
_MAX_QUESTIONS = 256  # about sizes, that wait for an answer; then the one about most pixels is not answered
_RETRY_AFTER_S = 1.0
_NUM_THREADS = 2  # one reads files, one answers


@dataclass(frozen=True, slots=True)
class ImageProblem:
    """Why images were not read. ``is_invalid``: they are at fault, and every worker would refuse them."""

    detail: str
    is_invalid: bool = True


@dataclass(slots=True, eq=False)
class Reading:
    """The images of one prompt: they wait, are read, and are held until ``ImageDesk.end``."""

    token_ids: Seq[int]
    num_prompt_tokens: int
    images: Seq[PromptImage]  # empty once they are read
    take: Callable[[ReadImages | ImageProblem], None]
    files_nbytes: int
    read_nbytes: int = 0
    is_over: bool = False


@dataclass(order=True, slots=True)
class _Question:
    num_pixels: int
    number: int
    asked: AskImages = field(compare=False)
    send: Callable[[ImagesTold], object] = field(compare=False)


class ImageDesk:
    """Reads images for a worker's requests, and answers gateways' questions about them."""

    def __init__(
        self,
        reader: ImageReader | None,
        on_loop: Callable[..., None],
        no_images: str = "",
        threads: Executor | None = None,
    ) -> None:
        """``on_loop``: from any thread, calls a function on the asyncio loop. ``no_images``: see ModelCard.

        ``threads``: run the reader's calls; by default threads of its own.
        """
        self._reader = None if no_images else reader
        self.no_images = no_images or ("this worker has no reader of images" if reader is None else "")
        self._on_loop = on_loop
        self._threads = threads or ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="images")  # starts none yet
        self._waiting: deque[Reading] = deque()
        self._current: Reading | None = None
        self._files_nbytes = 0  # of waiting and current ones
        self._read_nbytes = 0  # of those that hold what was read
        self._questions: list[_Question] = []  # waiting ones, in order
        self._num_asked = 0
        self._is_answering = False

    @property
    def takes_whole(self) -> bool:
        """See ImageReader."""
        return self._reader is not None and self._reader.takes_whole

    def answer(self, asked: AskImages, send: Callable[[ImagesTold], object]) -> None:
        """Send the answer to a gateway's question, perhaps before this returns."""
        if self._reader is None:
            send(ImagesTold(query=asked.query, problem=self.no_images))
            return
        self._num_asked += 1
        num_pixels = sum(width * height for width, height in set(asked.sizes))
        bisect.insort(self._questions, _Question(num_pixels, self._num_asked, asked, send))
        if len(self._questions) > _MAX_QUESTIONS:
            last = self._questions.pop()
            last.send(ImagesTold(query=last.asked.query))
        self._answer_next()

    def refusal(self, submit: Submit) -> Refusal | None:
        """Why this worker does not read the request's images, now or ever; None if it does."""
        if submit.images and self.no_images:
            return Refusal(FailureCode.INVALID, f"the prompt has images: {self.no_images}")
        if submit.images and self._files_nbytes >= _MAX_FILES_NBYTES:
            detail = f"{self._files_nbytes / 2**20:.0f} MiB of images wait already"
            return Refusal(FailureCode.QUEUE_FULL, detail, _RETRY_AFTER_S)
        return None

    def read(
        self,
        token_ids: Seq[int],
        num_prompt_tokens: int,
        images: Seq[PromptImage],
        take: Callable[[ReadImages | ImageProblem], None],
    ) -> Reading:
        """Read a prompt's images. ``take`` is called once, later, unless ``end`` comes first. The worker must be open.

        ``token_ids`` must not change before. The arguments are those of ``ImageReader.read``.
        """
        assert self._reader is not None, "this worker reads no images"
        reading = Reading(token_ids, num_prompt_tokens, images, take, sum(len(image.data) for image in images))
        self._waiting.append(reading)
        self._files_nbytes += reading.files_nbytes
        self._go_on()
        return reading

    def end(self, reading: Reading) -> None:
        """The images are not needed any more. Call it once for each reading, in any state of it."""
        assert not reading.is_over, "images end once"
        reading.is_over = True
        if reading in self._waiting:
            self._waiting.remove(reading)
            self._drop_files(reading)
        self._read_nbytes -= reading.read_nbytes
        self._go_on()

    def close(self) -> None:
        """Stop reading. Blocks until the threads have ended."""
        self._threads.shutdown(cancel_futures=True)

    def _go_on(self) -> None:
        """Read the next prompt's images, if there is room for them."""
        if self._current is not None or not self._waiting or self._read_nbytes >= _MAX_READ_NBYTES:
            return
        assert self._reader is not None, "images wait, and nobody reads them"
        self._current = self._waiting.popleft()
        self._threads.submit(self._read, self._reader, self._current)

    def _done(self, reading: Reading, result: ReadImages | ImageProblem) -> None:
        self._current = None
        self._drop_files(reading)
        if isinstance(result, ReadImages) and not reading.is_over:
            reading.read_nbytes = _num_bytes(result)
            self._read_nbytes += reading.read_nbytes
        self._go_on()
        if not reading.is_over:
            reading.take(result)

    def _drop_files(self, reading: Reading) -> None:
        reading.images = ()
        self._files_nbytes -= reading.files_nbytes

    def _answer_next(self) -> None:
        if self._is_answering or not self._questions:
            return
        assert self._reader is not None, "a question waits, and nobody answers it"
        self._is_answering = True
        question = self._questions.pop(0)
        self._threads.submit(self._answer, self._reader, question.asked, question.send)

    def _told(self, send: Callable[[ImagesTold], object], told: ImagesTold) -> None:
        self._is_answering = False
        self._answer_next()
        try:
            send(told)
        except MalformedMessageError as error:  # too large
            send(ImagesTold(query=told.query, problem=f"too many images, or too large ones: {error}"))

    # -- on the threads --------------------------------------------------------------------------------------------

    def _answer(self, reader: ImageReader, asked: AskImages, send: Callable[[ImagesTold], object]) -> None:
        try:
            told = ImagesTold(query=asked.query, told=reader.texts(asked.sizes))
        except Exception as error:
            problem = _problem(error)
            told = ImagesTold(query=asked.query, problem=problem.detail if problem.is_invalid else "")
        self._on_loop(self._told, send, told)

    def _read(self, reader: ImageReader, reading: Reading) -> None:
        result: ReadImages | ImageProblem
        try:
            # Blocks are cached under the digests, so a wrong one would give another image's answer to others.
            for number, image in enumerate(reading.images):
                if image_digest(image.data) != image.span.digest:
                    raise ImageError(f"image {number} does not have the digest that came with it")
            result = reader.read(reading.token_ids, reading.num_prompt_tokens, reading.images)
        except Exception as error:
            result = _problem(error)
        self._on_loop(self._done, reading, result)


def _problem(error: Exception) -> ImageProblem:
    if isinstance(error, ImageError):
        return ImageProblem(str(error))
    logger.error("images could not be read", exc_info=error)
    return ImageProblem(f"the images could not be read: {type(error).__name__}", is_invalid=False)


def _num_bytes(read: ReadImages) -> int:
    numbers = [one for inputs in read.inputs for one in inputs.values()]
    return sum(len(one.data) for one in numbers) + (0 if read.positions is None else len(read.positions.data))
