"""Reading images: against transformers' own processing of the same file, and broken files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.engine.images.files import decoded
from kvrelay.engine.images.interface import ImageError
from kvrelay.engine.images.reader import ProcessorReader, tensor_of
from kvrelay.engine.models.hf.reading import make_reader

from .test_images import png, prompt_of
from .tiny_images import save_image_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

WITHOUT_VIDEOS = ("llava", "idefics3", "gemma3")  # types whose processor the library loads by itself here


def reader_of(model_type: str, directory: Path) -> ProcessorReader:
    save_image_model(model_type, directory)
    return make_reader(directory)


@pytest.mark.parametrize("model_type", WITHOUT_VIDEOS)
def test_inputs_and_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reader = reader_of(model_type, tmp_path)
    prompt = prompt_of(reader, [(60, 33), (31, 60)], 1)
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    theirs = AutoProcessor.from_pretrained(tmp_path)
    for image, inputs, told in zip(prompt.images, read.inputs, reader.texts([(60, 33), (31, 60)]).texts, strict=True):
        picture = Image.open(io.BytesIO(image.data))
        made = theirs(images=[picture], text=theirs.image_token, images_kwargs={"return_tensors": "pt"})
        assert reader.tokens_of(told.text) == [one for one in made["input_ids"][0] if one > 2 or model_type != "gemma3"]
        for name, numbers in inputs.items():
            torch.testing.assert_close(
                tensor_of(numbers), torch.as_tensor(made[name]), rtol=0, atol=0, check_dtype=False
            )


def test_smolvlm_has_the_text_of_its_own_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of("smolvlm", tmp_path)
    (told,) = reader.texts([(60, 33)]).texts
    own = processing_smolvlm.get_image_prompt_string(
        2,
        2,
        4,
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )
    assert told.text == own
    assert told.num_placeholders == own.count("<image>") == 20


def test_equal_sizes_have_equal_texts_in_any_company(tmp_path: Path) -> None:
    reader = reader_of("qwen2_5_vl", tmp_path)
    alone = [reader.texts([size]).texts[0] for size in ((60, 33), (20, 30))]
    assert reader.texts([(60, 33), (20, 30), (60, 33)]).texts == [*alone, alone[0]]
    assert alone[0].num_placeholders != alone[1].num_placeholders


def test_positions_come_with_axes_and_an_offset(tmp_path: Path) -> None:
    reader = reader_of("qwen2_5_vl", tmp_path)
    prompt = prompt_of(reader, [(60, 33)], 1)
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    assert read.positions is not None
    positions = tensor_of(read.positions)
    assert positions.shape == (3, len(prompt.token_ids))
    assert int(positions.max()) + 1 == len(prompt.token_ids) + read.position_offset
    assert reader.read(prompt.token_ids[:5], 5, []).positions is None


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_is_turned_as_its_exif_data_says(name: str) -> None:
    picture = Image.new("RGB", (8, 4), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    written = io.BytesIO()
    picture.save(written, format=name, **({} if name == "GIF" else {"exif": exif}))
    read = decoded(written.getvalue(), 0)
    assert read.mode == "RGB"
    assert read.size == ((8, 4) if name == "GIF" else (4, 8))


@pytest.mark.parametrize("orientation", range(10))
def test_a_turned_file_is_as_pillow_shows_it(orientation: int) -> None:
    picture = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    written = io.BytesIO()
    picture.save(written, format="PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(written.getvalue())))
    read = decoded(written.getvalue(), 0)
    assert (read.size, read.tobytes()) == (expected.size, expected.tobytes())


@pytest.mark.parametrize("data", [b"", b"no image", png((60, 33), 1)[:400], b"BM" + bytes(60)])
def test_a_broken_file_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="image 3 cannot be read as one of PNG, JPEG, WEBP, GIF"):
        decoded(data, 3)


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    reader = reader_of("qwen2_5_vl", tmp_path)
    prompt = prompt_of(reader, [(60, 33)], 1)
    data = png((20, 30), 1)
    span = prompt.images[0].span
    other = PromptImage(ImageSpan(span.start, span.stop, image_digest(data)), data)
    with pytest.raises(
        ImageError, match=r"image 0 of 20 x 30 pixels takes \d+ placeholders \(token 5\); its place .* has \d+"
    ):
        reader.read(prompt.token_ids, len(prompt.token_ids), [other])
    with pytest.raises(ImageError, match="absolute aspect ratio must be smaller"):
        reader.texts([(2000, 4)])


def test_an_image_without_tokens_is_refused(tmp_path: Path) -> None:
    reader = reader_of("lighton_ocr", tmp_path)
    assert reader.texts([(60, 33)]).texts[0].num_placeholders
    with pytest.raises(ImageError, match="an image of 12 x 47 pixels has no tokens: it is too small"):
        reader.texts([(60, 33), (12, 47)])


def test_images_that_touch_are_refused_where_the_model_takes_them_for_one(tmp_path: Path) -> None:
    reader = reader_of("qwen2_5_vl", tmp_path)
    (told,) = reader.texts([(60, 33)]).texts
    data, tokens = png((60, 33), 1), reader.tokens_of(told.text)
    spans = [ImageSpan(start, start + len(tokens), image_digest(data)) for start in (1, 1 + len(tokens))]
    prompt = [60, *tokens, *tokens, 61]
    with pytest.raises(ImageError, match=r"finds no positions for the images .* put text between images"):
        reader.read(prompt, len(prompt), [PromptImage(span, data) for span in spans])
