"""Where images stand in a prompt's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.images import ImageText, ImageTexts, image_digest, spans_problem
from kvrelay.gateway.apis.openai.bodies import checked_messages
from kvrelay.gateway.chat.dialect import Chat, Dialect, read_chat
from kvrelay.gateway.chat.image_prompt import placed, where_is, with_texts
from kvrelay.gateway.chat.images import Gallery
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.errors import ChatTemplateError, InvalidRequestError
from kvrelay.gateway.text.tokenizer import Tokenizer

from ..pictures import BEGIN, END, MARK, PAD, PAD_ID, TEMPLATE, part, picture, save_model, texts_of

FILES = [picture(size, colour=number) for number, size in enumerate([(8, 6), (30, 2), (3, 17), (8, 6)])]
# Texts of users: letters, spaces, special characters of the model's marks, but no whole mark.
TEXTS = st.text(alphabet="ab <>\n|é", max_size=6).filter(lambda text: MARK not in text and PAD not in text)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_model(tmp_path_factory.mktemp("seeing")))


def chat_of(messages: list[dict[str, Any]], source: str = TEMPLATE, **more: Any) -> Chat:
    gallery, template = Gallery(), ChatTemplate(source, {})
    shown = checked_messages(messages, gallery)
    return read_chat(template, Dialect.of(source), shown, images=gallery.images, given={"messages": messages}, **more)


@given(st.lists(st.lists(st.one_of(TEXTS, st.integers(0, len(FILES) - 1)), max_size=5), min_size=1, max_size=4))
def test_any_order_of_texts_and_images(seeing: Tokenizer, turns: list[list[str | int]]) -> None:
    """The ids are those of the text that has each image's text in its place, and each image's span is where it stands."""
    files = [FILES[one] for turn in turns for one in turn if isinstance(one, int)]
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": one} if isinstance(one, str) else part(FILES[one]) for one in turn],
        }
        for turn in turns
    ]
    chat = chat_of(messages)
    assert [image.data for image in chat.images] == files
    told = texts_of([image.size for image in chat.images])
    text = with_texts(chat.prompt, told, chat.given, PAD)
    sizes = iter(told.texts)
    expected = "".join(
        "<user>" + "".join(one if isinstance(one, str) else next(sizes).text for one in turn) + ";" for turn in turns
    )
    assert text == expected
    ids = seeing.encode(text, add_special_tokens=False)
    assert ids == seeing.encode(expected, add_special_tokens=False)
    images = placed(ids, chat.images, told)
    assert spans_problem([image.span for image in images], len(ids)) is None
    assert [(image.data, image.span.digest) for image in images] == [(data, image_digest(data)) for data in files]
    begins = [place for place, one in enumerate(ids) if seeing.token_text(one) == BEGIN]
    ends = [place for place, one in enumerate(ids) if seeing.token_text(one) == END]
    assert [(image.span.start - 1, image.span.stop) for image in images] == list(zip(begins, ends, strict=True))
    between = [one for image in images for one in ids[image.span.start : image.span.stop]]
    assert between.count(PAD_ID) == ids.count(PAD_ID)


def test_a_chat_without_images_stays_as_it_is() -> None:
    texts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    assert chat_of(texts, "{% for m in messages %}{{ m.content }}{% endfor %}").prompt == "ab"


@pytest.mark.parametrize("reserved", [MARK, PAD])
@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": "see {} here"}, "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "{}"}]},
            "content[1].text",
        ),
        ({"role": "system", "content": "{}"}, "messages[1].content"),
        ({"role": "assistant", "content": None, "reasoning_content": "{}"}, "messages[1].reasoning_content"),
    ],
)
def test_a_mark_in_a_text_does_not_pass_for_an_image(message: dict[str, Any], where: str, reserved: str) -> None:
    content = message["content"]
    spoiled = {name: text.replace("{}", reserved) if isinstance(text, str) else text for name, text in message.items()}
    if isinstance(content, list):
        spoiled["content"] = [{**one, "text": one["text"].replace("{}", reserved)} for one in content]
    chat = chat_of([{"role": "user", "content": [part(FILES[0])]}, spoiled])
    with pytest.raises(InvalidRequestError, match="marks an image in this model's prompts") as caught:
        with_texts(chat.prompt, texts_of([(8, 6)]), chat.given, PAD)
    assert (caught.value.param or "").endswith(where)


def test_a_mark_that_two_texts_make_does_not_pass_for_an_image() -> None:
    halves = [{"type": "text", "text": one} for one in (MARK[:3], MARK[3:])]
    chat = chat_of([{"role": "user", "content": [*halves, part(FILES[0])]}])
    with pytest.raises(ChatTemplateError, match="shows 2 of 1 images"):
        with_texts(chat.prompt, texts_of([(8, 6)]), chat.given, PAD)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 0),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", 0),
        (TEMPLATE.replace("<image>", "<image><image>"), 2),
    ],
)
def test_a_template_that_shows_no_images_or_too_many(source: str, shown: int) -> None:
    chat = chat_of([{"role": "user", "content": [part(FILES[0]), {"type": "text", "text": "a"}]}], source)
    with pytest.raises(ChatTemplateError, match=f"chat template shows {shown} of 1 images") as caught:
        with_texts(chat.prompt, texts_of([(8, 6)]), chat.given, PAD)
    assert caught.value.param == "messages"


def test_a_template_that_cannot_render_images_says_so_later() -> None:
    """Whether the model reads images at all comes first, and only its workers know."""
    source = "{% for m in messages %}{{ 'user: ' + m.content }}{% endfor %}"
    assert "cannot render" in str(chat_of([{"role": "user", "content": [part(FILES[0])]}], source).refusal)
    with pytest.raises(ChatTemplateError):
        chat_of([{"role": "user", "content": "a"}], source.replace("'user: '", "1"))


@pytest.mark.parametrize("number", [0, 2])
def test_another_number_of_placeholders_than_told_is_refused(seeing: Tokenizer, number: int) -> None:
    chat = chat_of([{"role": "user", "content": [part(FILES[0])]}])
    told = ImageTexts(mark=MARK, placeholder=PAD_ID, texts=[ImageText(PAD * number, 1)])
    ids = seeing.encode(with_texts(chat.prompt, told, chat.given, PAD), add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match=f"has {number} placeholders of images, and its images have 1"):
        placed(ids, chat.images, told)


def test_a_result_with_an_image_is_shown_as_text_where_a_template_knows_no_tools() -> None:
    """The same order of images as in the conversation."""
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [part(FILES[1]), {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "seen"}, part(FILES[2])]},
        {"role": "tool", "tool_call_id": "b", "content": "nothing"},
    ]
    chat = chat_of(messages, tools=[{"type": "function", "function": {"name": "see"}}])
    assert [image.data for image in chat.images] == [FILES[1], FILES[2]]
    assert f"<user>{MARK}look;" in chat.prompt
    expected = f"<user><tool_response>\nseen{MARK}\n</tool_response>\n<tool_response>\nnothing\n</tool_response>;"
    assert chat.prompt.endswith(expected)


def test_where_a_text_is() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert where_is("y", {"messages": deep}) is None
    assert where_is("b", {"messages": [{"a": 1}, {"content": [None, "abc"]}]}) == "messages[1].content[1]"
    assert where_is("name", {"tools": [{"a name": 1}]}) == "tools[0]"
