"""A self-check at load, for prompts with images: compares the model over paged K/V with transformers' own forward pass.

The reference gets the images as the processor prepares them together, with the towers and plain attention. Ours reads each file
alone, encodes each image alone, and computes the prompt in chunks, on all ranks.
"""

from __future__ import annotations

import inspect
import io
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from PIL import Image

from kvrelay.common.errors import ModelError
from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.engine.images.files import decoded
from kvrelay.engine.images.interface import ImageError, ReadImages
from kvrelay.engine.images.reader import ProcessorReader
from kvrelay.engine.models.hf.check import TOLERANCES, MakeOps, Prompt, join_of, paged_logits
from kvrelay.engine.models.hf.images import ImageEncoder, SharedRows, StepImages
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.text import drop_towers
from kvrelay.engine.models.ranks import Collectives, RankPart

logger = logging.getLogger(__name__)

_SIZES = ((40, 28), (24, 48))  # width, height
_MOST_TOKENS = 1024  # of two images; if they take more, one is enough
_LARGE = (4096, 4096)
_TEXT = 5  # tokens before, between and behind images
_CHUNK = 13  # tokens of a step
_ROUNDED = 1.5  # how much farther than text images may be by rounding; what is wrong is off by more
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments of models, 1 for parts of images


class ImageUse:
    """Whether a model that was loaded with towers reads images: first its reference is computed, later it is compared.

    A model that does not pass loses its towers, and serves text. Of several ranks the first one has the towers and the reference,
    and all compute the prompt.
    """

    _model: TransformersModel  # that is served; known from ``begin`` on

    def __init__(self, reference: TransformersModel | None, reader: ProcessorReader | None, no_images: str) -> None:
        """Computes the reference, and keeps nothing else of this model, which is not bound. ``reader``: None if the model that is
        served has no towers, for the reason ``no_images``.
        """
        self.no_images = no_images  # as in ModelCard
        self._reader = reader
        self._check: ImageCheck | None = None
        self._ranks: Collectives | None = None
        self.takes_whole = False  # as ImageReader.takes_whole, once the model has passed
        if reader is not None and reference is not None:
            try:
                self._check = plain_image_logits(reference, reader)
            except ModelError as error:
                self._give_up(error)

    @torch.inference_mode()
    def begin(self, model: TransformersModel, part: RankPart | None) -> None:
        """Encode the prompt's images with the model that is to be served, or a rank's ``part`` of it. Waits for all ranks.

        It encodes before ranks meet, so that none waits for an encoder, or for one that fails.
        """
        self._model = model
        if self._reader is not None and self._check is None:
            drop_towers(model.model)
        told: ToldCheck | None = None
        if self._reader is not None and self._check is not None:
            try:
                told = encode_check(self._model, self._check, self._reader)
            except ModelError as error:
                self._refuse(error)
        if part is None or not (said := part.meet(b"" if told is None else msgspec.msgpack.encode(told))):
            return
        self._ranks = part.collectives
        told = msgspec.msgpack.decode(said, type=ToldCheck)
        device, dtype = self._model.model.device, self._model.model.dtype
        shared = SharedRows(part.collectives, told.width, told.num_deep, dtype, device)
        if part.is_leader:
            self._model.images.share(shared)
        else:
            self._model.images = StepImages(None, told.placeholder, shared)
            self._check = ImageCheck(told.token_ids, told.images, None)

    def check(self, make_ops: MakeOps, dtype: torch.dtype, of_text: float = 0.0) -> None:
        """Compare the model with the reference. ``of_text``: the distance that text has. Raises RuntimeError if a rank is lost."""
        if self._check is None:
            return
        check, self._check = self._check, None
        try:
            check_images(self._model, check, make_ops, dtype, of_text, self._ranks)
            self.takes_whole = check.images.takes_whole
        except ModelError as error:
            self._refuse(error)

    def measure(self, device: torch.device, part: RankPart | None) -> int:
        """Bytes of a GPU's memory that encoding a large image takes; 0 for a model that encodes none. Waits for all ranks, which
        hear whether the first one reads images.
        """
        nbytes = self._measure(device)
        if part is not None:  # an encoder may take longer than ranks wait in a collective
            self.takes_whole = bool(part.meet(b"takes whole" if part.is_leader and self.takes_whole else b""))
        return nbytes

    def _measure(self, device: torch.device) -> int:
        if self._reader is None or self.no_images:
            return 0
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            inputs, _ = self._reader.process([Image.new("RGB", _LARGE)])
            with torch.inference_mode():
                ImageEncoder(self._model.model).encode_tensors(inputs)
        except (ImageError, torch.OutOfMemoryError) as error:
            self._refuse(ModelError(f"an image of {_LARGE[0]} x {_LARGE[1]} pixels cannot be encoded: {error}"))
        nbytes = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return 0 if self.no_images else nbytes

    def _refuse(self, error: ModelError) -> None:
        self._model.images = StepImages(None, -1)
        drop_towers(self._model.model)
        self._give_up(error)

    def _give_up(self, error: ModelError) -> None:
        self.no_images, self.takes_whole, self._check = str(error), False, None
        if self._reader is not None:  # the other ranks have nothing to add
            logger.warning("prompts may have no images: %s", error)


@dataclass(frozen=True, slots=True)
class ImageCheck:
    """A prompt with images, and what transformers computes of it."""

    token_ids: list[int]
    images: ReadImages
    logits: torch.Tensor | None  # [num_tokens, vocab]; None on ranks that do not compare


class ToldCheck(msgspec.Struct, frozen=True):
    """What the first rank tells the others, so that they compute the same prompt."""

    token_ids: list[int]
    images: ReadImages  # without inputs of the encoder
    placeholder: int
    width: int  # as in SharedRows
    num_deep: int


@torch.inference_mode()
def plain_image_logits(model: TransformersModel, reader: ProcessorReader) -> ImageCheck:
    """The reference of :func:`check_images`. Call it before ``bind``. Raises ModelError if the model does not run with images."""
    try:
        token_ids, files = _prompt(model.shape.vocab_size, reader)
        images = reader.read(token_ids, len(token_ids), files)
        inputs, _ = reader.process([decoded(file.data, number) for number, file in enumerate(files)])
        with model.plain_attention():
            return ImageCheck(token_ids, images, _plain(model, token_ids, inputs, reader.texts([]).placeholder))
    except ModelError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise ModelError(f"the model does not run with images ({type(error).__name__}: {error})") from error


def _plain(
    model: TransformersModel, token_ids: list[int], inputs: dict[str, torch.Tensor], placeholder: int
) -> torch.Tensor:
    whole, device = model.model, model.model.device
    prompt = torch.tensor([token_ids], device=device)
    takes = inspect.signature(whole.forward).parameters
    given: dict[str, Any] = {
        name: one.to(device, whole.dtype if one.is_floating_point() else one.dtype) for name, one in inputs.items()
    }
    types = {name for name in takes if name.endswith("token_type_ids")}
    if others := types.difference(_TOKEN_TYPES):
        raise ModelError(f"its forward pass takes {', '.join(others)}, which we do not know")
    given |= {name: (prompt == placeholder).long() for name in types}
    output = whole(input_ids=prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **given)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def encode_check(model: TransformersModel, check: ImageCheck, reader: ProcessorReader) -> ToldCheck:
    """Encode the images of :func:`check_images`, each alone. From now on the model encodes images.

    Raises ModelError if it cannot.
    """
    placeholder, images = reader.texts([]).placeholder, check.images
    try:
        steps = StepImages(ImageEncoder(model.model), placeholder)
        prompt = join_of(0, Prompt(check.token_ids, images))
        encoded = [
            steps.encoded(prompt, number, prompt.token_ids[span.start : span.stop].count(placeholder))
            for number, span in enumerate(images.spans)
        ]
    except Exception as error:  # a model's own code may raise anything
        raise ModelError(f"the model encodes no image alone ({type(error).__name__}: {error})") from error
    model.images = steps
    width, num_deep = encoded[0].rows.shape[1], len(encoded[0].deep)
    return ToldCheck(check.token_ids, images.without_inputs(), placeholder, width, num_deep)


@torch.inference_mode()
def check_images(
    model: TransformersModel,
    check: ImageCheck,
    make_ops: MakeOps,
    dtype: torch.dtype,
    of_text: float = 0.0,
    ranks: Collectives | None = None,
) -> float:
    """The relative distance of the logits from transformers' own; 0 on ranks that do not compare.

    ``of_text``: that of text, which passed. Where rounding brings it near the limit, images may exceed this a little. ``ranks``:
    all of them compute the prompt.

    Raises ModelError if the distance is too large, or if the model does not run with images on all ``ranks``.
    """
    prompt, found, failed = Prompt(check.token_ids, check.images), None, ""
    try:
        (found,) = paged_logits(
            model.model.device, model.shape, [prompt], lambda *pool: (model, make_ops(*pool)), dtype, _CHUNK
        )
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    # A rank that failed alone left the others in a collective, and this one fails, too: then the start ends.
    if ranks is not None and not ranks.least(int(not failed)) and not failed:
        failed = "another rank failed"
    if found is None or failed:
        raise ModelError(f"the model does not run with images over paged K/V ({failed})")
    if check.logits is None:
        return 0.0
    distance = float((found.float() - check.logits).norm() / check.logits.norm())
    # What near ties of a router move in the text is no measure for images.
    allowed = max(TOLERANCES[dtype], _ROUNDED * min(of_text, TOLERANCES[dtype]))
    if not distance <= allowed:
        raise ModelError(
            f"with images the model over paged K/V is not what transformers computes: logits differ by {distance:.2g} of their "
            f"size, more than {allowed:g}"
        )
    return distance


def _prompt(vocab_size: int, reader: ProcessorReader) -> tuple[list[int], list[PromptImage]]:
    """A prompt with two images, or one, and the files."""
    told = reader.texts(_SIZES)
    sizes = _SIZES if sum(one.num_placeholders for one in told.texts) <= _MOST_TOKENS else _SIZES[:1]
    generator = torch.Generator().manual_seed(1)
    token_ids, images = _text(vocab_size, told.placeholder, generator), []
    for size, text in zip(sizes, told.texts, strict=False):
        tokens = reader.tokens_of(text.text)
        places = [place for place, token in enumerate(tokens, len(token_ids)) if token == told.placeholder]
        data = _file(size, generator)
        images.append(PromptImage(ImageSpan(places[0], places[-1] + 1, image_digest(data)), data))
        token_ids += tokens + _text(vocab_size, told.placeholder, generator)
    return token_ids, images


def _text(vocab_size: int, placeholder: int, generator: torch.Generator) -> list[int]:
    tokens = torch.randint(vocab_size - 1, (_TEXT,), generator=generator)
    return (tokens + (tokens >= placeholder)).tolist()


def _file(size: tuple[int, int], generator: torch.Generator) -> bytes:
    """A picture of random pixels."""
    pixels = torch.randint(256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(written, format="PNG")
    return written.getvalue()
