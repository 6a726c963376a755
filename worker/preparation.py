"""What an attempt needs before the model thread takes it: its guide, its adapter and its images.

They are asked for when the attempt is registered, and come in any order while it is COMPILING; on a decode worker perhaps already
while it is LEASED. ``Entry.is_prepared`` says when all are there. If one cannot be had, the attempt fails with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Generic, TypeVar

from kvrelay.common.images import PromptImage
from kvrelay.engine.guides.guidance import GuideCompiler, GuideRefusal, GuideResult
from kvrelay.engine.images.interface import ReadImages
from kvrelay.worker.adapters import AdapterRefusal, AdapterStore
from kvrelay.worker.entries import Entry, Outcome, Phase, failed
from kvrelay.worker.images import ImageDesk, ImageProblem
from kvrelay.worker.submit import guide_failed, images_failed

E = TypeVar("E", bound=Entry)


class Preparation(Generic[E]):
    """Gets guides, adapters and images for entries of type ``E``, and gives them back. Asyncio loop only."""

    def __init__(
        self,
        guides: GuideCompiler,
        adapters: AdapterStore,
        images: ImageDesk,
        on_loop: Callable[..., None],
        on_change: Callable[[E], None],
        on_failed: Callable[[E, Outcome], None],
    ) -> None:
        """``on_loop``: from any thread, calls a function on the asyncio loop. The other two may be called before ``begin`` returns.

        ``on_change``: the entry has got something, and may have ended meanwhile. ``on_failed``: it cannot get something.
        """
        self._guides = guides
        self._adapters = adapters
        self._images = images
        self._on_loop = on_loop
        self._on_change = on_change
        self._on_failed = on_failed

    def begin(self, entry: E, images: Seq[PromptImage]) -> None:
        """Ask for what the entry needs: ``images``, its adapter, and its guide's state after the output so far.

        An adapter that is refused at once ends the entry, and its guide is not compiled.
        """
        sequence = entry.sequence
        if images:
            take = partial(self._on_images, entry)
            entry.reading = self._images.read(sequence.token_ids, sequence.num_prompt_tokens, images, take)
        if entry.adapter is not None:
            self._adapters.acquire(entry.adapter, partial(self._on_adapter, entry))
        if sequence.sampling.guide is not None and entry.phase is not Phase.CLOSING:
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            self._guides.start(sequence.sampling, output, partial(self._on_loop, self._on_guide, entry))

    def drop_images(self, entry: E) -> None:
        """Free the memory of the entry's images. The model thread must not compute it any more."""
        if entry.reading is not None:
            self._images.end(entry.reading)
            entry.reading = entry.sequence.images = None

    def end(self, entry: E) -> None:
        """Release the entry's adapter. One that is still loading is released when it has loaded: the entry must be CLOSING."""
        if entry.sequence.adapter:
            self._release_adapter(entry)

    def _release_adapter(self, entry: E) -> None:
        assert entry.adapter is not None, f"{entry.key} has no adapter"
        self._adapters.release(entry.adapter)

    def _on_images(self, entry: E, result: ReadImages | ImageProblem) -> None:
        if isinstance(result, ImageProblem):
            self._on_failed(entry, images_failed(entry.key, result.detail, is_invalid=result.is_invalid))
        else:
            entry.sequence.images, entry.sequence.position_offset = result, result.position_offset
            self._on_change(entry)

    def _on_adapter(self, entry: E, result: int | AdapterRefusal) -> None:
        """``result``: the slot of the entry's adapter, which the entry now uses; or why there is none."""
        if isinstance(result, AdapterRefusal):
            self._on_failed(entry, failed(entry.key, result.code, result.detail, result.retry_after_s))
        elif entry.phase is Phase.CLOSING:
            self._release_adapter(entry)
        else:
            entry.sequence.adapter = result
            self._on_change(entry)

    def _on_guide(self, entry: E, result: GuideResult) -> None:
        if isinstance(result, GuideRefusal):
            self._on_failed(entry, guide_failed(entry.key, result.detail, is_invalid=result.is_invalid))
        else:
            entry.sequence.guide = result
            self._on_change(entry)
