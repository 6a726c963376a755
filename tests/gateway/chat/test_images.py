"""Images of bodies: their forms, headers and limits. No pixel is decoded."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image, ImageFile

from kvrelay.engine.images.files import decoded
from kvrelay.gateway.chat import images
from kvrelay.gateway.chat.images import ChatImage, Gallery, with_files
from kvrelay.gateway.errors import InvalidRequestError

from ..pictures import data_url, in_base64, part, picture

WHERE = "messages[2].content[1]"


def size_of(given: dict[str, Any]) -> tuple[int, int]:
    gallery = Gallery()
    gallery.add(given, WHERE)
    [image] = gallery.images
    assert isinstance(image, ChatImage)
    assert image.param == WHERE
    return image.size


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        Gallery().add(given, WHERE)
    assert (caught.value.param, caught.value.status) == (WHERE, 400)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_all_formats_and_forms(kind: str) -> None:
    data = picture((9, 4), kind)
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    forms: list[dict[str, Any]] = [
        part(data),
        part(data, detail="low"),
        {"type": "image_url", "image_url": data_url(data)},
        {"type": "input_image", "image_url": data_url(data), "detail": "high"},
        {"type": "image", "source": source},
        {"type": "image_url", "image_url": f"DATA:image/svg+xml;name=a;base64,{in_base64(data)}"},
    ]
    for form in forms:
        gallery = Gallery()
        gallery.add(form, WHERE)
        assert gallery.images == [ChatImage(data, (9, 4), WHERE)]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", [0, *range(1, 10)])
def test_a_lying_image_is_as_it_is_shown(kind: str, orientation: int) -> None:
    expected = (4, 9) if orientation in (5, 6, 7, 8) else (9, 4)
    assert size_of(part(picture((9, 4), kind, orientation=orientation))) == expected


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks_telling(orientation: int) -> list[bytes]:
    """Every way in which a PNG may tell it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = exif.tobytes()
    xmp = f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode()
    raw = b"Raw profile type exif\0\nexif\n%8d\n" % len(data) + data.hex().encode()
    return [
        chunk(b"eXIf", data.removeprefix(b"Exif\0\0")),
        chunk(b"tEXt", raw),
        chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + xmp),
    ]


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_orientation_behind_the_pixels_does_not_count(orientation: int) -> None:
    """Not for workers either, who decode the pixels: their texts must be those of the gateway's size."""
    frames = [Image.new("RGB", (9, 4), colour) for colour in ("red", "green", "blue")]
    animated = io.BytesIO()
    frames[0].save(animated, "PNG", save_all=True, append_images=frames[1:])
    for data in (picture((9, 4)), animated.getvalue()):
        for late in chunks_telling(orientation):
            file = data[:-12] + late + data[-12:]
            assert size_of(part(file)) == decoded(file, 0).size == (9, 4)


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_an_orientation_in_front_of_the_pixels_counts_however_it_is_told(orientation: int) -> None:
    data = picture((9, 4))
    place = data.index(b"IDAT") - 4
    for early in chunks_telling(orientation):
        file = data[:place] + early + data[place:]
        assert size_of(part(file)) == decoded(file, 0).size == ((4, 9) if orientation > 4 else (9, 4))


def png_of(width: int, height: int) -> bytes:
    """A file that promises pixels and has none."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 4) + b"IDAT" + bytes(8)


def webp_of(width: int, height: int) -> bytes:
    """A lossless image's header."""
    bits = (width - 1) | (height - 1) << 14
    chunk = b"VP8L" + struct.pack("<I", 10) + b"\x2f" + struct.pack("<I", bits) + bytes(5)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def test_pixels_are_bounded_and_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: object) -> None:
        raise AssertionError("pixels are decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    monkeypatch.setattr(Image.Image, "load", decode)
    assert size_of(part(png_of(50_000, 1000))) == (50_000, 1000)
    assert "50000 x 1001 pixels, more than 50 million" in refusal(part(png_of(50_000, 1001)))
    for width in (95_000, 200_000, 2**31 - 1):  # from here on Pillow warns, and refuses
        assert "more than 50 million" in refusal(part(png_of(width, 1000)))
    assert refusal(part(webp_of(16_383, 16_383)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_damaged_file_is_refused_or_has_its_size(kind: str) -> None:
    """A file that ends early, or has a wrong byte."""
    data = picture((9, 4), kind, orientation=None if kind == "GIF" else 6)
    assert size_of(part(data))
    for end in range(len(data)):
        for damaged in (data[:end], data[:end] + bytes([data[end] ^ 0xFF]) + data[end + 1 :]):
            with contextlib.suppress(InvalidRequestError):
                assert size_of(part(damaged))


@pytest.mark.parametrize("data", [b"", b"x", b"<svg/>", b"BM" + bytes(100), b"II*\0" + bytes(100), b"%PDF-1.4"])
def test_other_files_are_refused(data: bytes) -> None:
    assert "is no PNG, JPEG, WebP or GIF that can be read" in refusal(part(data))


@pytest.mark.parametrize("spoiled", ["\n", " ", "é", "-", "_", "=", "==", "A"])
def test_base64_is_strict(spoiled: str) -> None:
    data = picture()
    text = in_base64(data + bytes((1 - len(data)) % 3))  # with padding
    for place in (1, len(text) - 8, len(text)):
        given = {"type": "input_image", "image_url": f"data:image/png;base64,{text[:place]}{spoiled}{text[place:]}"}
        assert "is not base64" in refusal(given), place


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"type": "image_url", "image_url": "file:///etc/passwd"},
            "it is not https://HOST/PATH; or send the image itself",
        ),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "it is not https://HOST/PATH"),
        ({"type": "image_url", "image_url": {"url": "https://me:pass@x.example/"}}, "it has a user or a password"),
        ({"type": "image", "source": {"type": "url", "url": "ftp://x.example/"}}, "it is not https://HOST/PATH"),
        ({"type": "image_url"}, "has no image_url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "has no image_url"),
        ({"type": "image_url", "image_url": "data:text/html;base64,AAAA"}, "must be data:image/TYPE;base64,"),
        ({"type": "image_url", "image_url": "data:image/png,AAAA"}, "must be data:image/TYPE;base64,"),
        ({"type": "input_image", "file_id": "file-1"}, "keeps no files"),
        ({"type": "image", "source": {"type": "url"}}, ".source is of type 'url'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source is of type 'file'"),
        ({"type": "image", "source": {"type": "base64"}}, ".source is of type 'base64'"),
        ({"type": "image"}, ".source is of type 'None'"),
    ],
)
def test_what_is_neither_a_file_nor_on_the_web_is_refused(given: dict[str, Any], text: str) -> None:
    shown = refusal(given)
    assert text in shown
    assert "passw" not in shown.replace("a password", "")


def link_to(name: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"https://x.example/{name}"}


def test_files_and_images_of_the_body_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = Gallery()
    for number in range(63):
        gallery.add(link_to("a"), str(number))
    gallery.add(part(png_of(50_000, 1000)), "63")
    with pytest.raises(InvalidRequestError, match="one image too many"):
        gallery.add(link_to("a"), WHERE)
    with pytest.raises(InvalidRequestError, match="have 200000048 pixels") as caught:
        with_files(gallery.images[-5:], [*[png_of(50_000, 1000)] * 3, picture((8, 6))])
    assert caught.value.param == "63"
    monkeypatch.setattr(images, "MAX_IMAGES_NBYTES", 1000)
    with pytest.raises(InvalidRequestError, match="a request's images may have 1000"):
        with_files(gallery.images[-2:], [picture() + bytes(1000)])


def test_numbers_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, given = Gallery(), part(picture())
    for number in range(64):
        gallery.add(given, f"messages[0].content[{number}]")
    with pytest.raises(InvalidRequestError, match="one image too many: a request may have 64"):
        gallery.add(given, WHERE)
    monkeypatch.setattr(images, "MAX_IMAGES_NBYTES", 2 * len(picture()))
    gallery = Gallery()
    gallery.add(given, WHERE)
    gallery.add(given, WHERE)
    with pytest.raises(InvalidRequestError, match=r"a request's images may have"):
        gallery.add(given, WHERE)


def test_pixels_are_bounded_together() -> None:
    """A file of a few kilobytes may promise millions, and a worker has to decode them all."""
    gallery, given = Gallery(), part(png_of(50_000, 1000))
    for number in range(4):
        gallery.add(given, f"messages[0].content[{number}]")
    with pytest.raises(InvalidRequestError, match=r"have 200000048 pixels; a request's images may have 200000000"):
        gallery.add(part(picture((8, 6))), WHERE)


def test_an_error_and_a_log_line_hold_no_image() -> None:
    gallery = Gallery()
    gallery.add(part(picture((64, 64), "JPEG")), WHERE)
    assert len(repr(gallery.images[0])) < 200
    shown = refusal({"type": "image_url", "image_url": "data:image/png;base64," + "A" * 1000 + "!"})
    assert "AAAA" not in shown
