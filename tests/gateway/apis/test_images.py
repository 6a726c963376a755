"""Images in chats of all APIs: the prompt that workers get, what is counted, and what is refused."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.images import image_digest
from kvrelay.common.model_card import IMAGES_OFF
from kvrelay.gateway.http.request import ApiRequest, RequestBody
from kvrelay.wire.messages import ABOUT_IMAGES, AskImages, FailureCode, ImagesTold, Submit

from ..http_app import CHAT, TEXT, App, app_for, apps_for, saying
from ..pictures import (
    MARK,
    PAD_ID,
    data_url,
    in_base64,
    num_pads,
    part,
    picture,
    save_model,
    seeing_card,
    telling,
    text_of,
)
from ..players import Player

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
CAT, DOG = picture((8, 6)), picture((30, 2), "JPEG")
T_CAT, T_DOG = text_of((8, 6)).text, text_of((30, 2)).text
SOURCE = {"type": "base64", "media_type": "image/png", "data": in_base64(CAT)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeing"))


def serving(directory: Path, no_images: str = "", **settings: Any) -> Any:
    return apps_for(
        directory,
        {"": saying("x")},
        {"": seeing_card(IMAGES_OFF)},
        {"": (saying("x"), seeing_card(no_images))},
        served_model_name="tiny",
        **settings,
    )


@pytest.fixture
async def seeing(directory: Path) -> AsyncIterator[App]:
    async with serving(directory) as apps:
        prefill(apps[""]).tell = telling
        yield apps[""]


def prefill(app: App) -> Player:
    assert app.prefill is not None
    return app.prefill


def tokens(app: App, text: str) -> list[int]:
    return app.tokenizer.encode(text, add_special_tokens=False)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


BODIES: list[tuple[str, dict[str, Any], str, list[bytes]]] = [
    (
        CHAT,
        {"messages": user(text("see "), part(CAT, detail="high"), text(" and "), text("this"), part(DOG))},
        f"<user>see {T_CAT} and this{T_DOG};",
        [CAT, DOG],
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "brief"},
                *user(part(DOG), text("a")),
                {"role": "assistant", "content": [text("b")]},
                *user(text("c"), part(CAT), part(DOG)),
            ]
        },
        f"<user>brief;<user>{T_DOG}a;<user>b;<user>c{T_CAT}{T_DOG};",
        [DOG, CAT, DOG],
    ),
    (
        RESPONSES,
        {
            "instructions": "brief",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see"},
                        {"type": "input_image", "image_url": data_url(CAT)},
                    ],
                }
            ],
        },
        f"<user>brief;<user>see{T_CAT};",
        [CAT],
    ),
    (
        MESSAGES,
        {"max_tokens": 5, "messages": user(text("a"), text("b"), {"type": "image", "source": SOURCE}, text("c"))},
        f"<user>a\n\nb{T_CAT}c;",
        [CAT],
    ),
]


@pytest.mark.parametrize(("path", "body", "prompt", "files"), BODIES, ids=[path for path, *_ in BODIES])
async def test_the_prompt_has_each_images_text_and_its_file(
    seeing: App, path: str, body: dict[str, Any], prompt: str, files: list[bytes]
) -> None:
    answer = await seeing.post(path, **body)
    [submit] = prefill(seeing).submits
    assert submit.token_ids == tokens(seeing, prompt)
    assert [image.data for image in submit.images] == files
    assert [image.span.digest for image in submit.images] == [image_digest(data) for data in files]
    for image in submit.images:
        assert submit.token_ids[image.span.start] == submit.token_ids[image.span.stop - 1] == PAD_ID
    assert submit.decode is not None
    assert seeing.player.submits == []
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(submit.token_ids)
    assert (await seeing.client.post(path, json={**body, "stream": True})).status_code == 200
    assert prefill(seeing).submits[1].token_ids == submit.token_ids
    assert len(prefill(seeing).asked) == 1


async def test_results_of_tools_may_have_images(seeing: App) -> None:
    """An image in a result comes before those of the message that brings it, as in the prompt."""
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    image = {"type": "image", "source": SOURCE}
    dog = {"type": "image", "source": {**SOURCE, "data": in_base64(DOG)}}
    content = [dog, text("and"), {**result, "content": [text("it is"), image]}]
    await seeing.post(
        MESSAGES, max_tokens=5, messages=[*user(text("go")), called, {"role": "user", "content": content}]
    )
    [submit] = prefill(seeing).submits
    assert [one.data for one in submit.images] == [CAT, DOG]
    assert f"Error: it is{T_CAT}" in seeing.tokenizer.decode_all(submit.token_ids)
    items = [
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_image", "image_url": data_url(DOG)}],
        },
    ]
    await seeing.post(RESPONSES, input=items)
    assert [one.data for one in prefill(seeing).submits[1].images] == [DOG]


async def test_counting_and_tokenizing_show_the_whole_prompt(seeing: App) -> None:
    prompt = f"<user>see{T_CAT};"
    ids = tokens(seeing, prompt)
    assert num_pads((8, 6)) == ids.count(PAD_ID)
    counted = await seeing.post(COUNT, messages=user(text("see"), {"type": "image", "source": SOURCE}))
    assert counted == {"input_tokens": len(ids)}
    tokenized = await seeing.post("/tokenize", messages=user(text("see"), part(CAT)), return_token_strs=True)
    assert (tokenized["tokens"], tokenized["count"]) == (ids, len(ids))
    shown = await seeing.post("/chat_tokenize", messages=user(text("see"), part(CAT)))
    assert shown["templated_text"] == prompt
    assert [token["id"] for token in shown["tokenize_response"]] == ids


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        {"messages": [{"role": "system", "content": [part(CAT)]}]},
        "messages[0].content[0]",
        "results of tools only",
    ),
    (CHAT, {"messages": [{"role": "assistant", "content": [text("a"), part(CAT)]}]}, "messages[0].content[1]", "only"),
    (CHAT, {"messages": user(part(b"x"))}, "messages[0].content[0]", "no PNG, JPEG, WebP or GIF"),
    (CHAT, {"messages": user(part(CAT)) * 65}, "messages[64].content[0]", "a request may have 64"),
    (CHAT, {"messages": user(text(MARK), part(CAT))}, "messages[0].content[0].text", "marks an image"),
    (CHAT, {"messages": user(part(CAT)), "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "cut an image"),
    (CHAT, {"messages": user(text("a" * 600), part(CAT)), "max_tokens": 1}, "messages", "at most 511"),
    (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": {"url": "https://x/y.png"}})},
        "messages[0].content[0]",
        "fetches nothing",
    ),
    (
        CHAT,
        {"messages": user({"type": "input_audio", "input_audio": {}})},
        "messages[0].content[0]",
        "no audio, video or files",
    ),
    (
        CHAT,
        {"messages": user({"type": "video_url", "video_url": {}})},
        "messages[0].content[0]",
        "no audio, video or files",
    ),
    (CHAT, {"messages": user({"type": "file", "file": {}})}, "messages[0].content[0]", "no audio, video or files"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0]",
        "keeps no files",
    ),
    (
        RESPONSES,
        {"input": [{"role": "developer", "content": [{"type": "input_image", "image_url": data_url(CAT)}]}]},
        "input[0].content[0]",
        "results of tools only",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
async def test_what_is_refused_by_name(seeing: App, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = (await seeing.post(path, 400, **body))["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert in_base64(CAT)[:40] not in error["message"]
    assert prefill(seeing).submits == seeing.player.submits == []


async def test_a_model_that_reads_no_images_says_why(directory: Path) -> None:
    async with serving(directory, "its checkpoint has no encoder of images") as apps:
        error = (await apps[""].post(CHAT, 400, messages=user(text("a"), part(CAT))))["error"]
        assert error["param"] == "messages[0].content[1]"
        expected = "model 'tiny' reads no images: its checkpoint has no encoder of images; send text only"
        assert error["message"] == expected
        assert prefill(apps[""]).asked == []
        await apps[""].post(CHAT, messages=user(text("a")))
    async with app_for(directory, saying("x"), card=seeing_card(IMAGES_OFF)) as app:
        error = (await app.post(CHAT, 400, messages=user(part(CAT))))["error"]
        assert f"reads no images: {IMAGES_OFF}" in error["message"]


async def test_a_template_for_texts_does_not_hide_that_the_model_reads_no_images(
    model_directory: Path, tmp_path: Path
) -> None:
    """The template cannot add a list to a text."""
    directory = tmp_path / "texts"
    shutil.copytree(model_directory, directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ 'user: ' + m.content }}{% endfor %}")
    async with app_for(directory, saying("x")) as app:
        error = (await app.post(CHAT, 400, messages=user(part(CAT))))["error"]
        assert "model 'tiny' reads no images" in error["message"]


async def test_a_worker_that_cannot_read_an_image_or_its_size_is_believed(seeing: App) -> None:
    def refuses(player: Player, submit: Submit) -> None:
        player.fail(submit, FailureCode.INVALID, about=ABOUT_IMAGES, detail="image 1 is cut off")

    def problem(player: Player, asked: AskImages) -> None:
        player.say(ImagesTold(query=asked.query, problem="image 0 is too thin"))

    prefill(seeing).script = refuses
    error = (await seeing.post(CHAT, 400, messages=user(part(CAT), {"type": "text", "text": "and"}, part(DOG))))[
        "error"
    ]
    assert (error["message"], error["param"]) == ("messages[0].content[2] is cut off", "messages[0].content[2]")
    assert len(prefill(seeing).submits) == 1
    prefill(seeing).tell = problem
    error = (await seeing.post(CHAT, 400, messages=user(part(DOG))))["error"]
    assert (error["message"], error["param"]) == ("image 0 is too thin", "messages[0].content[0]")


async def test_of_several_images_none_is_named_if_the_worker_names_none(seeing: App) -> None:
    prefill(seeing).script = lambda player, submit: player.fail(
        submit, FailureCode.INVALID, about=ABOUT_IMAGES, detail="an image is odd"
    )
    for parts, param in ([part(CAT), part(DOG)], "messages"), ([text("this"), part(DOG)], "messages[0].content[1]"):
        error = (await seeing.post(CHAT, 400, messages=user(*parts)))["error"]
        assert (error["message"], error["param"]) == ("an image is odd", param)
    prefill(seeing).tell = lambda player, asked: player.say(
        ImagesTold(query=asked.query, problem="an image is too thin")
    )
    error = (await seeing.post(CHAT, 400, messages=user(part(CAT), part(picture((1, 90))))))["error"]
    assert (error["message"], error["param"]) == ("an image is too thin", "messages")


async def test_nothing_that_is_kept_or_logged_holds_an_image(seeing: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    prefill(seeing).script = lambda player, submit: player.fail(submit, FailureCode.INTERNAL, 0.0)
    await seeing.post(CHAT, 502, messages=user(part(CAT)))
    shown = [(await seeing.client.get(path)).text for path in ("/debug/requests", "/debug/workers", "/metrics")]
    for told in (caplog.text, *shown):
        assert in_base64(CAT)[20:60] not in told
        assert repr(CAT[8:20])[2:-1] not in told


def large(number_of_bytes: int) -> bytes:
    """An image whose file is that large: what stands behind it is not read."""
    return CAT + bytes(number_of_bytes - len(CAT))


async def test_a_body_may_be_larger_by_its_images(directory: Path) -> None:
    async with serving(directory, max_body_bytes=100_000, max_image_bytes=1_000_000) as apps:
        app, image = apps[""], large(300_000)
        prefill(app).tell = telling
        await app.post(CHAT, messages=user(part(image), part(image), text("a" * 100)))
        assert [len(one.data) for one in prefill(app).submits[0].images] == [300_000, 300_000]
        await app.post(CHAT, 413, messages=user(part(image), part(image), part(image)))
        for body in (
            {"messages": user(text("a" * 100_001))},
            {"messages": user(text("a")), "unknown": in_base64(image)},
            {"messages": user({**text("a"), "data": in_base64(image)}, part(CAT))},
            {"messages": user(text("a"), part(CAT)), "unknown": [1] * 100_000},
        ):
            error = (await app.post(CHAT, 413, **body))["error"]
            assert "without images; the limit is 100000" in error["message"]
        await app.post(TEXT, 413, prompt="a" * 100_001)
        await app.post("/tokenize", 413, prompt="a" * 100_001)
        await app.post("/tokenize", messages=user(part(image)))
        assert len(prefill(app).submits) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": user(part(CAT))}),
        (RESPONSES, {"input": user({"type": "input_image", "image_url": data_url(CAT)})}),
        (MESSAGES, {"messages": user({"type": "image", "source": SOURCE}), "max_tokens": 1}),
    ],
)
async def test_a_stream_keeps_no_body(seeing: App, path: str, body: dict[str, Any]) -> None:
    kept: list[object] = []

    def script(player: Player, submit: Submit) -> None:
        gc.collect()
        kept.extend(
            one
            for one in gc.get_objects()
            # Not isinstance, of which some objects of other libraries warn.
            if RequestBody in type(one).__mro__ or (type(one) is ApiRequest and in_base64(CAT) in str(vars(one)))
        )
        saying("x")(player, submit)

    prefill(seeing).script = script
    answer = await seeing.client.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(prefill(seeing).submits) == 1
    assert not kept
