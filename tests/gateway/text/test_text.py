"""From tokens to the client's text: detokenizer, stop strings and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.common.errors import ModelError
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.text.output import StopMatcher, overlap
from kvrelay.gateway.text.tokenizer import Detokenizer, Tokenizer


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte. Characters beyond ASCII have several tokens."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, {}, ())


BYTES = byte_tokenizer()
Make = Callable[..., Detokenizer]


@pytest.fixture(params=[True, False], ids=["tokens are bytes", "tokens depend on others"])
def detokenizer_of(request: pytest.FixtureRequest) -> Make:
    """Makes detokenizers of both kinds, which must give the same text."""

    def make(silent_ids: Sequence[int] = ()) -> Detokenizer:
        return BYTES.detokenizer(silent_ids) if request.param else Detokenizer(BYTES.decode_all, silent_ids)

    return make


def pieces_of(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    pieces: list[str] = []
    start = 0
    for length in [*cuts, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[start : start + length]))
        start += length
        if start >= len(token_ids):
            break
    return [*pieces, detokenizer.finish()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_pieces_add_up_and_are_whole_characters(detokenizer_of: Make, text: str, cuts: list[int]) -> None:
    pieces = pieces_of(detokenizer_of(), BYTES.encode(text, add_special_tokens=False), cuts)
    assert "".join(pieces) == text.rstrip("\ufffd") or "".join(pieces) == text
    for piece in pieces:
        piece.encode()  # raises for half a character
        assert "\ufffd" not in piece or "\ufffd" in text


@pytest.mark.parametrize("text", ["a€", "日本語", "🙂", "e\u0301"])
def test_an_unfinished_character_at_the_end_is_dropped(detokenizer_of: Make, text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(detokenizer_of(), ids[:-1], [1] * 20)) == text[:-1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(token_ids=st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes_them(detokenizer_of: Make, token_ids: list[int]) -> None:
    pieces = pieces_of(detokenizer_of(), token_ids, [1] * len(token_ids))
    whole = BYTES.decode(token_ids)
    sent = "".join(pieces)
    assert whole.startswith(sent)
    assert not whole[len(sent) :].strip("\ufffd"), "only an unfinished end may be missing"
    assert len(whole) - len(sent) <= 4


def test_an_end_token_that_the_tokenizer_does_not_call_special_stays_silent(detokenizer_of: Make) -> None:
    ids = BYTES.encode("ab", add_special_tokens=False)
    detokenizer = detokenizer_of((ids[1],))
    assert detokenizer.push(ids) + detokenizer.push(ids[:1]) + detokenizer.finish() == "aa"


def test_tokens_that_are_bytes_are_not_decoded_again_with_those_before_them() -> None:
    seen: list[list[int]] = []

    def counting(token_ids: Sequence[int]) -> str:
        seen.append(list(token_ids))
        return BYTES.decode_all(token_ids)

    detokenizer = Detokenizer(counting, text_of=BYTES.token_text)
    ids = BYTES.encode("abéc", add_special_tokens=False)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "b", "", "é", "c"]
    assert {tuple(window) for window in seen} == {tuple(ids[2:3]), tuple(ids[2:4])}


def test_tokens_that_depend_on_others_are_decoded_with_them() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1}, "▁a"))
    backend.decoder = tokenizers.decoders.Metaspace()
    detokenizer = Tokenizer(backend, {}, ()).detokenizer()
    assert [detokenizer.push([token_id]) for token_id in (0, 1, 0)] == ["a", " b", " a"]


def test_the_bytes_of_tokens_add_up_to_the_text() -> None:
    text = "".join(map(chr, range(0x180))) + "日🙂"
    ids = BYTES.encode(text, add_special_tokens=False)
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<0xC3>": 0, "<0xA9>": 1, "\ufffd": 2}, "\ufffd"))
    backend.decoder = tokenizers.decoders.ByteFallback()
    assert b"".join(map(Tokenizer(backend, {}, ()).token_bytes, range(3))) == "é\ufffd".encode()


def test_no_window_grows_with_the_text() -> None:
    """The detokenizer decodes few tokens at a time, even after tokens without text or bytes that never form a character."""
    seen: list[int] = []

    def counting(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return BYTES.decode(token_ids)

    detokenizer = Detokenizer(counting, silent_ids={999})
    continuation = BYTES.encode("é", add_special_tokens=False)[1]
    pieces = [detokenizer.push([token_id]) for token_id in [999] * 100 + [continuation] * 100]
    assert max(seen) <= 8
    assert 95 <= len("".join(pieces)) <= 100


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one, found character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(len(stop) for stop in complete)], True
    return text, False


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
        # Text that is sent may not be part of a stop string.
        assert text.startswith(sent)
        assert len(sent) <= len(cut_at_stop(text, stops)[0])
        if matcher.matched is not None or start >= len(text):
            break
    assert (sent + matcher.finish(), matcher.matched is not None) == cut_at_stop(text[:start], stops)


class Marker(str):
    """A text that counts the copies of its parts."""

    num_copies = 0

    def __getitem__(self, part: SupportsIndex | slice) -> str:
        self.num_copies += 1
        return super().__getitem__(part)


def test_only_a_beginning_that_may_match_is_copied() -> None:
    """For a long stop string, anything else would take a copy per character, for each new token."""
    marker = Marker("ab" * 5000)
    assert overlap("x" * 9000 + "y", marker) == 0
    assert overlap("x" * 9000 + "ab", marker) == 2
    assert overlap("ab" * 4000, marker) == 8000
    assert overlap("", marker) == overlap("x", "") == 0
    short = Marker("y" + "z" * 5000)
    assert overlap("x" * 9000 + "y", short) == 1
    assert short.num_copies <= 2


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


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """Training scripts may leave truncation and padding in tokenizer.json. Both are ignored."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "[PAD]": 1}, "x"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.enable_truncation(3)
    backend.enable_padding(length=8, pad_token="[PAD]", pad_id=1)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("x x x x x", add_special_tokens=False) == [0] * 5


def test_switches_are_no_special_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "x": 1}, "x"))
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"add_bos_token": True, "bos_token": "<s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>"}
    assert tokenizer.skipped_ids == {0}
    assert tokenizer.decode([0, 1, 0]) == "x"


TEMPLATE = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
{{ bos_token }}
{% for message in messages %}
    {% if loop.index > 9 %}{% break %}{% endif %}
[{{ message['role'] | upper }}] {{ message.content | trim }} {{ {'é': 1} | tojson }}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}",
        "{% for m in messages %}{% generation %}\n  {% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}\n{% endfor %}",
        "{{ messages | tojson(indent=2, sort_keys=True) }}{{ messages | tojson(separators=(',', ':')) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
def test_a_template_renders_as_transformers_renders_it(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - the reference, slow to import

    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "<b> & 'quotes' ü\n"}]
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == rendered[0]


PARTS_ONLY = """{% for message in messages %}{{ message.role }}: {% for part in message['content'] %}
{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}
<end>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TEXT_OR_PARTS = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{{ part.text }} in parts{% endfor %}{% endif %}{% endfor %}"""


def test_a_template_for_parts_of_a_message_shows_its_text() -> None:
    """Those of SmolVLM, Idefics and LLaVA go through a text letter by letter, and show none."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a question"}]
    rendered = "system: be brief<end>user: a question<end>assistant:"
    assert ChatTemplate(PARTS_ONLY, {}).render(messages) == rendered
    messages.append({"role": "assistant", "content": "I mean"})
    rendered = rendered.removesuffix("assistant:") + "assistant: I mean"
    assert ChatTemplate(PARTS_ONLY, {}).render(messages, continues=True) == rendered
    assert ChatTemplate(TEXT_OR_PARTS, {}).render(messages) == "be briefa questionI mean"


@pytest.mark.parametrize("content", ["Begun", "<", "[", "user", "Begun \n", " Begun", "Begun\n[ASSISTANT]"])
@pytest.mark.parametrize("shown", ["message.content", "message.content | trim", "message.content ~ '<end>' | trim"])
def test_an_open_message_ends_where_transformers_leaves_it_open(shown: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - the reference, slow to import

    source = TEMPLATE.replace("message.content | trim", shown)
    messages = [{"role": "user", "content": "Begun"}, {"role": "assistant", "content": content}]
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=source, continue_final_message=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, continues=True) == rendered[0]


@pytest.mark.parametrize(
    ("source", "content"), [("{{ messages[0].content }}", " "), ("{{ messages[0].content[:2] }}", "Begun")]
)
def test_a_message_that_the_template_does_not_show_cannot_be_left_open(source: str, content: str) -> None:
    with pytest.raises(InvalidRequestError, match="shows as it is"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": content}], continues=True)


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (TEMPLATE, [{"role": "tool", "content": ""}], "no tools here"),
        (None, [{"role": "user", "content": ""}], "no chat template"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "cannot render"),
        ("{{ 1 / 0 }}", [{"role": "user", "content": "x"}], "division by zero"),
        ("{% for i in range(9999999) %}{% endfor %}", [{"role": "user", "content": "x"}], "cannot render"),
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
    config.unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert ChatTemplate.load(tmp_path, {}).render(messages) == "of a processor"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, {}).render(messages) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate.load(tmp_path, {})


def save_words(directory: Path, post_processor: Any = None) -> None:
    """Save a tokenizer of the words ``<s>`` and ``x``."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "x": 1}, "x"))
    backend.add_special_tokens(["<s>"])
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("layout", ["named", "files", "one file beside named ones"])
def test_the_template_for_tools_is_the_one_that_transformers_takes(layout: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the reference, slow to import

    save_words(tmp_path)
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "named for tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    if layout != "named":
        (tmp_path / "chat_template.jinja").write_text("file")
    if layout == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    ours, theirs = ChatTemplate.load(tmp_path, {}), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.source == theirs.get_chat_template()
    for_tools = ours if ours.with_tools is None else ours.with_tools
    assert for_tools.source == theirs.get_chat_template(tools=[{}])


@pytest.mark.parametrize(
    "post_processor",
    [
        None,
        tokenizers.processors.ByteLevel(),  # DeepSeek's
        tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)]),  # Llama 3's
    ],
    ids=["none", "bytes", "template"],
)
@pytest.mark.parametrize("switch", [True, False])
def test_a_prompt_begins_as_in_transformers(post_processor: Any, switch: bool, tmp_path: Path) -> None:
    """tokenizer.json alone decides: transformers ignores the switches in tokenizer_config.json beside it."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the reference, slow to import

    save_words(tmp_path, post_processor)
    config = {"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": switch, "add_eos_token": switch}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)("x")["input_ids"]
    assert Tokenizer.load(tmp_path).encode("x", add_special_tokens=True) == theirs
