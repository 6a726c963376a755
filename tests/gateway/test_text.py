"""From tokens to the text a client sees: detokenizer, stop strings, chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.errors import ModelError
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.detokenizer import Detokenizer
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.stop import StopMatcher
from kvrelay.gateway.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII is spread over tokens."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, {}, ())


BYTES = byte_tokenizer()


def pieces_of(token_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(BYTES)
    pieces: list[str] = []
    start = 0
    for length in [*cuts, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[start : start + length]))
        start += length
        if start >= len(token_ids):
            break
    return [*pieces, detokenizer.finish()]


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_pieces_add_up_and_are_whole_characters(text: str, cuts: list[int]) -> None:
    pieces = pieces_of(BYTES.encode(text, add_special_tokens=False), cuts)
    assert "".join(pieces) == text.rstrip("\ufffd") or "".join(pieces) == text
    for piece in pieces:
        piece.encode()  # no half of anything
        assert "\ufffd" not in piece or "\ufffd" in text


@pytest.mark.parametrize("text", ["a€", "日本語", "🙂", "e\u0301"])
def test_an_unfinished_character_at_the_end_is_dropped(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(ids[:-1], [1] * 20)) == text[:-1]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
def test_no_part_of_a_stop_string_is_sent(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    sent, start = "", 0
    for length in [*cuts, len(text)]:
        sent += matcher.push(text[start : start + length])
        start += length
        # What is sent may never turn out to be the beginning of a stop string.
        assert text.startswith(sent)
        assert len(sent) <= len(cut_at_stop(text, stops)[0])
        if matcher.matched is not None or start >= len(text):
            break
    # The stream may stop at a match that a longer look would have found to begin earlier only if both end together.
    seen = text[:start]
    assert (sent + matcher.finish(), matcher.matched is not None) == cut_at_stop(seen, stops)


def test_the_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_end_of_text_ids_come_from_every_file(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0, "<f>": 1, "<g>": 2, "x": 3}, "x"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (1, 2, 0)
    assert tokenizer.special_tokens == {"eos_token": "<e>"}


TEMPLATE = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
{{ bos_token }}
{% for message in messages %}
    {% if loop.index > 9 %}{% break %}{% endif %}
[{{ message['role'] | upper }}] {{ message.content | trim }} {{ {'é': 1} | tojson }}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""


def test_a_template_renders_as_transformers_renders_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - the reference, slow to import

    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "<b> & 'quotes' ü\n"}]
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(messages) == rendered[0]


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (TEMPLATE, [{"role": "tool", "content": ""}], "no tools here"),
        (None, [{"role": "user", "content": ""}], "no chat template"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "cannot render"),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], "refuses"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "refuses"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(
    source: str | None, messages: list[dict[str, str]], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "string"}))
    assert ChatTemplate.load(tmp_path, {}).render(messages) == "string"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path, {}).render(messages) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, {}).render(messages) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate.load(tmp_path, {})
