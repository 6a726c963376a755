"""Guides of every kind with the demo model's tokenizer and random logits: outputs, refusals, replays, forced tokens and masks."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from kvrelay.common.sampling import GuideKind
from kvrelay.common.sampling_check import MAX_GUIDE_BYTES
from kvrelay.engine.guides.compiler import GrammarCompiler
from kvrelay.engine.guides.guidance import GuideCompiler, GuideRefusal, GuideResult
from kvrelay.engine.step.sequence import GuideState

from ..guided import RandomModel, compiled, refusal

EOS = 2
START = 1  # <|im_start|>
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {
            "type": "json_schema",
            "json_schema": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 200}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
        "end": "\n</tool_call>",
    },
}


def state_of(result: GuideResult) -> GuideState:
    assert not isinstance(result, GuideRefusal), result.detail
    return result


def texts(
    compiler: GuideCompiler, vocabulary: list[bytes], kind: GuideKind, text: str = "", stop: tuple[int, ...] = (EOS,)
) -> list[str]:
    """Eight outputs, which must all be complete."""
    found = []
    for seed in range(8):
        model = RandomModel(vocabulary, seed)
        output, is_over = model.generate(state_of(compiled(compiler, kind, text, stop)), stop)
        assert is_over
        found.append(model.text(output))
    return found


def is_sum(text: str) -> bool:
    return isinstance(eval(text), int)  # only digits, plus signs and parentheses


def is_tag(text: str) -> bool:
    inner = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    return set(json.loads(inner)) == {"city", "days"}


CHOICES = ['say "hi"', "back\\slash", "line\nbreak", "größe 😀", "a", "ab", '" | "x']
OF_EACH_KIND: list[tuple[GuideKind, str, Callable[[str], object]]] = [
    (GuideKind.JSON_OBJECT, "", lambda text: isinstance(json.loads(text), dict)),
    (GuideKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [1, "é"]}}', lambda text: set(json.loads(text)) <= {1, "é"}),
    *((GuideKind.REGEX, pattern, re.compile(pattern).fullmatch)
      for pattern in (r"[a-c]{3}-\d+", r"(yes|no), .{2,9}!", r"\S{1,5}@example\.(com|org)", "größe: [0-9]")),
    (GuideKind.GRAMMAR, 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"', is_sum),
    (GuideKind.CHOICE, json.dumps(CHOICES), CHOICES.__contains__),
    (GuideKind.STRUCTURAL_TAG, json.dumps(TAG), is_tag),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "matches"), OF_EACH_KIND)
def test_outputs_match(
    guide_compiler: GrammarCompiler,
    vocabulary: list[bytes],
    kind: GuideKind,
    text: str,
    matches: Callable[[str], object],
) -> None:
    found = texts(guide_compiler, vocabulary, kind, text)
    assert len(set(found)) > 1
    for one in found:
        assert matches(one), one


def test_without_stop_tokens_the_output_ends_where_nothing_may_follow(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    for text in texts(guide_compiler, vocabulary, GuideKind.CHOICE, '["yes", "no"]', stop=()):
        assert text in {"yes", "no"}


def test_a_grammar_that_may_end_and_go_on_allows_stop_tokens_and_is_not_complete(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    model = RandomModel(vocabulary, 0)
    state = state_of(compiled(guide_compiler, GuideKind.REGEX, "a+", stop=(5, 7)))
    assert not {5, 7, EOS} & set(model.allowed(state).tolist())
    state.accept(vocabulary.index(b"a"))
    assert {5, 7} <= set(model.allowed(state).tolist())
    assert EOS not in model.allowed(state)
    assert not state.is_complete
    forever = state_of(compiled(guide_compiler, GuideKind.REGEX, "a+", stop=()))
    forever.accept(vocabulary.index(b"a"))
    assert not forever.is_complete
    assert EOS not in model.allowed(forever)


def test_special_tokens_are_no_text(guide_compiler: GrammarCompiler, vocabulary: list[bytes]) -> None:
    special = {token_id for token_id, piece in enumerate(vocabulary) if piece.startswith(b"\xff<|")} - {EOS}
    assert vocabulary[START] == b"\xff<|im_start|>"
    for kind, text in (
        (GuideKind.REGEX, "(<|im_start|>|[<>|_a-z])+"),
        (GuideKind.REGEX, "[^a]+"),
        (GuideKind.GRAMMAR, "root ::= [^a]+"),
        (GuideKind.GRAMMAR, 'root ::= "<|im_start|>" | x\nx ::= "(" x ")" | "x"'),
        (GuideKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "any_text"}}'),
        (GuideKind.JSON_SCHEMA, '{"type": "string"}'),
    ):
        state = state_of(compiled(guide_compiler, kind, text))
        if kind is GuideKind.JSON_SCHEMA:
            state.accept(vocabulary.index(b'"'))
        assert not special & set(RandomModel(vocabulary, 0).allowed(state).tolist()), text


def test_a_structural_tag_may_ask_for_special_tokens(guide_compiler: GrammarCompiler, vocabulary: list[bytes]) -> None:
    for token_id in (START, vocabulary.index(b"\xff<|endoftext|>"), START):
        end = {"type": "token", "token": token_id}
        tag = {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": end}
        text = json.dumps({"type": "structural_tag", "format": tag})
        output = [vocabulary.index(b"a"), vocabulary.index(b"x")]
        state = state_of(compiled(guide_compiler, GuideKind.STRUCTURAL_TAG, text, output=output))
        allowed = RandomModel(vocabulary, 0).allowed(state).tolist()
        assert [one for one in allowed if vocabulary[one].startswith(b"\xff<|")] == [token_id]
        state.accept(token_id)
        assert state.is_complete


def test_an_output_is_replayed_and_goes_on_as_it_would_have(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string", "minLength": 5}}, "required": ["a"]}'
    model = RandomModel(vocabulary, 3)
    first = state_of(compiled(guide_compiler, GuideKind.JSON_SCHEMA, schema))
    output, _ = model.generate(first, max_tokens=4)
    second = state_of(compiled(guide_compiler, GuideKind.JSON_SCHEMA, schema, output=output))
    assert model.allowed(first).tolist() == model.allowed(second).tolist()


def test_an_output_that_does_not_match_is_refused(guide_compiler: GrammarCompiler, vocabulary: list[bytes]) -> None:
    output = [vocabulary.index(b"a"), vocabulary.index(b"x")]
    result = compiled(guide_compiler, GuideKind.REGEX, "a+", output=output)
    assert isinstance(result, GuideRefusal)
    assert "does not match the guide at its token 1" in result.detail


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GuideKind.REGEX, "(a", "unclosed group"),
        (GuideKind.REGEX, "a(?=b)", "look-around"),
        (GuideKind.REGEX, "a^b", "lookarounds not supported"),
        (GuideKind.GRAMMAR, "root ::= other", "other"),
        (GuideKind.GRAMMAR, "root ::= root", "nothing can match it"),
        (GuideKind.CHOICE, "[]", "at least one string"),
        (GuideKind.CHOICE, "nope", "not JSON"),
        (GuideKind.JSON_SCHEMA, "[1, 2", "not JSON"),
        (GuideKind.JSON_SCHEMA, "false", "nothing can match it"),
        (GuideKind.JSON_SCHEMA, '{"type": "strin"}', "strin"),
        (GuideKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GuideKind.JSON_SCHEMA, '{"$ref": "#"}', "nothing can match it"),
        (GuideKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "nothing"}}', "nothing"),
        (
            GuideKind.STRUCTURAL_TAG,
            json.dumps(TAG).replace('"maxLength": 200', '"not": {}'),
            'Unimplemented keys: ["not"]',
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    guide_compiler: GrammarCompiler, kind: GuideKind, text: str, reason: str
) -> None:
    detail = refusal(guide_compiler, kind, text)
    assert reason in detail
    assert "start:" not in detail, "a place in our text, of which the client knows nothing"
    assert len(detail) <= 500


def test_a_short_guide_that_becomes_a_long_grammar_is_refused(guide_compiler: GrammarCompiler) -> None:
    """Each parameter in tags has a copy of all definitions, which every sequence would hold."""
    definitions = {f"d{number}": {"type": "object", "properties": {"x": {"type": "integer"}}} for number in range(400)}
    parameters = {f"p{number}": {"$ref": "#/$defs/d0"} for number in range(400)}
    schema = {"type": "object", "properties": parameters, "$defs": definitions}
    tag = json.dumps({"format": {"type": "qwen_xml_parameter", "json_schema": schema}})
    assert len(tag) < MAX_GUIDE_BYTES
    assert "becomes a grammar of" in refusal(guide_compiler, GuideKind.STRUCTURAL_TAG, tag)


def test_a_long_reason_is_cut(guide_compiler: GrammarCompiler) -> None:
    assert len(refusal(guide_compiler, GuideKind.JSON_SCHEMA, json.dumps({"type": "x" * 5000}))) == 500


def test_what_grows_too_ambiguous_ends_its_sequence_alone(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    state = state_of(compiled(guide_compiler, GuideKind.REGEX, "(abc|[d-z]{3,7})+" * 3500))
    model = RandomModel(vocabulary, 0)
    while len(allowed := model.allowed(state)):
        state.accept(int(allowed[-1]))
    with pytest.raises(ValueError, match="too ambiguous to follow"):
        state.accept(0)


def test_a_dead_end_is_told_by_the_next_token(guide_compiler: GrammarCompiler, vocabulary: list[bytes]) -> None:
    grammar = 'root ::= "b" | "a" x | "(" root ")"\nx ::= x'
    state = state_of(compiled(guide_compiler, GuideKind.GRAMMAR, grammar))
    state.accept(vocabulary.index(b"a"))
    assert not len(RandomModel(vocabulary, 0).allowed(state))
    with pytest.raises(ValueError, match="no token at all"):
        state.accept(vocabulary.index(b"b"))


@pytest.fixture
def follows_slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a mask takes is no reason here to draft nothing: on a busy machine any mask may take long."""
    monkeypatch.setattr("kvrelay.engine.guides.state._TOO_SLOW_S", math.inf)


@pytest.mark.usefixtures("follows_slow_masks")
@pytest.mark.parametrize(("kind", "text", "matches"), OF_EACH_KIND)
def test_forced_tokens_may_all_come_and_leave_the_state_where_it_stood(
    guide_compiler: GrammarCompiler,
    vocabulary: list[bytes],
    kind: GuideKind,
    text: str,
    matches: Callable[[str], object],
) -> None:
    """Forced tokens may be accepted in part or completely. A single allowed token is forced. Asking changes no
    state."""
    for seed in range(4):
        model, draws = RandomModel(vocabulary, seed), random.Random(seed)
        state, plain = (state_of(compiled(guide_compiler, kind, text)) for _ in range(2))
        output: list[int] = []
        while not state.is_complete and len(output) < 100:
            forced, allowed = state.forced(draws.randint(1, 9)), model.allowed(plain).tolist()
            assert model.allowed(state).tolist() == allowed
            if EOS in allowed:
                assert not forced
                break
            assert state.num_allowed(allowed[:1]) == 1
            assert set(forced[:1]) == set(allowed) if len(allowed) == 1 else set(forced[:1]) <= set(allowed)
            assert state.num_allowed(forced) == len(forced)
            along = forced or (draws.choice(allowed),)
            for token_id in along[: draws.randint(1, len(along))]:
                state.accept(token_id)
                plain.accept(token_id)
                output.append(token_id)
        assert state.is_complete == plain.is_complete
        if state.is_complete:
            assert state.forced(5) == ()
            assert matches(model.text(output))


@pytest.mark.usefixtures("follows_slow_masks")
def test_a_schema_forces_names_and_punctuation_as_the_tokenizer_splits_them(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"population": {"type": "integer"}}, "required": ["population"]}
    )
    state = state_of(compiled(guide_compiler, GuideKind.JSON_SCHEMA, schema))
    state.accept(vocabulary.index(b"{"))  # the tokenizer would not split it here
    assert [vocabulary[token_id] for token_id in state.forced(9)] == [b'"', b"population", b'":']
    assert [vocabulary[token_id] for token_id in state.forced(2)] == [b'"', b"population"]


@pytest.mark.usefixtures("follows_slow_masks")
def test_a_draft_has_the_masks_that_its_tokens_get_one_by_one(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes]
) -> None:
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    plain, drafted, free = (state_of(compiled(guide_compiler, GuideKind.JSON_SCHEMA, schema)) for _ in range(3))
    output, _ = RandomModel(vocabulary, 3).generate(free)
    masks = np.zeros((len(output), -(-len(vocabulary) // 32)), dtype=np.int32)
    for mask, token_id in zip(masks, output, strict=True):
        plain.fill(mask)
        plain.accept(token_id)
    along, here = np.zeros_like(masks[:5]), np.zeros_like(masks[0])
    for start in range(len(output)):
        draft = output[start : start + 5]
        assert drafted.num_allowed([*draft, EOS]) == len(draft)
        drafted.fill_along(along[: len(draft)], draft)
        behind = masks[start + 1 : start + 1 + len(draft)]
        assert (along[: len(behind)] == behind).all()
        drafted.fill(here)
        assert (here == masks[start]).all()
        forbidden = int(np.flatnonzero(~np.unpackbits(here.view(np.uint8), bitorder="little").astype(bool))[0])
        assert drafted.num_allowed([forbidden]) == 0
        drafted.accept(output[start])
    assert drafted.is_complete == plain.is_complete


def test_nothing_is_drafted_where_the_last_mask_was_slow(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.engine.guides.state._TOO_SLOW_S", -1.0)
    state = state_of(compiled(guide_compiler, GuideKind.CHOICE, '["yes"]'))
    assert state.forced(9) == ()
    assert state.num_allowed([vocabulary.index(b"y")]) == 0
    monkeypatch.setattr("kvrelay.engine.guides.state._TOO_SLOW_S", math.inf)
    assert state.forced(9) != ()
    assert state.num_allowed([vocabulary.index(b"y")]) == 1
