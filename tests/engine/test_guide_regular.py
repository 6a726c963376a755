"""Regular guides: masks token by token, against xgrammar's, and where a sequence stands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import xgrammar as xgr

from kvrelay.common.sampling import GuideKind
from kvrelay.engine import guide_regular
from kvrelay.engine.bitmask import num_words
from kvrelay.engine.guide_automaton import DEAD, START, Automaton, build_automaton
from kvrelay.engine.guide_grammar import compile_guide, regular_automaton
from kvrelay.engine.guide_process import tokenizer_info
from kvrelay.engine.guide_regular import RegularGuide, RegularState, TokenTree, make_regular_guide
from kvrelay.engine.guide_rules import read_rules
from kvrelay.engine.guide_state import XGrammarState
from kvrelay.engine.sequence import GuideState

from .guided import RandomModel

WORDS = [b"", b"a", b"b", b"ab", b"ba", b"abab", b"c", b" ", b"a b", b"\xc3", b"\xa9", "é".encode(), b"d" * 40, b"ab"]
END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[^a-f.]{1,200}-?.$"},
        "kind": {"enum": ["x", "yé"]},
        "numbers": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
PATTERNS = [
    r"([A-Z][a-z]{2,9} ){20,60}end\.",
    r"(\w+ ){3,5}",
    r"[a-z]{5,60}",
    r"größe: [0-9😀-😂ä-一]+|\S{1,5}@example\.(com|org)",
    r".{0,40}[^\n]x?",
    r"([0-9]+|[a-f]*){2}\d{3}",
]


def automaton_of(pattern: str) -> Automaton:
    return build_automaton(read_rules(xgr.Grammar.from_regex(pattern).serialize_json()))


def guide_of(pattern: str, vocabulary: Seq[bytes]) -> RegularGuide:
    guide = make_regular_guide(automaton_of(pattern), TokenTree.of(vocabulary))
    assert guide is not None
    return guide


def allowed(state: GuideState, vocab_size: int) -> list[int]:
    mask = np.full(num_words(vocab_size), 0x5A5A5A5A, dtype=np.int32)  # whatever was there before
    state.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


@pytest.mark.parametrize("pattern", ["(ab)*c?", "[^a]+", "é|a b", "(a|b){2,9} *", "d{30,50}a", "(ab|ba)+", "c"])
def test_the_mask_of_every_state_is_what_the_tokens_do_one_by_one(pattern: str) -> None:
    automaton, tree = automaton_of(pattern), TokenTree.of(WORDS)
    guide = make_regular_guide(automaton, tree)
    assert guide is not None
    for state in range(len(automaton.moves)):
        expected = 0
        for token_id, token in enumerate(WORDS):
            reached = state
            for byte in token:
                reached = int(automaton.moves[reached, automaton.columns[byte]])
            expected |= (token != b"" and reached != DEAD) << token_id
        for mask in (
            tree.mask(automaton, state),
            tree.within(automaton).mask(automaton, state),
            guide.masks[guide.mask_of[state]],
        ):
            assert mask.view(np.uint32).tolist() == [expected]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((GuideKind.REGEX, pattern) for pattern in PATTERNS),
        (GuideKind.GRAMMAR, 'root ::= item{2,9} tail\nitem ::= [a-z]{1,3} ("," | ";")\ntail ::= "." tail | "!"'),
        (GuideKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 2, "maxLength": 300})),
        (GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ],
)
def test_masks_are_xgrammars(kind: GuideKind, text: str, vocabulary: list[bytes]) -> None:
    end = vocabulary.index(b"")
    compiler = xgr.GrammarCompiler(tokenizer_info(vocabulary, end), max_threads=1, cache_enabled=False)
    grammar = compile_guide(compiler, kind, text)
    automaton = regular_automaton(kind, text)
    assert automaton is not None
    guide = make_regular_guide(automaton, TokenTree.of(vocabulary))
    assert guide is not None
    guide = RegularGuide.from_bytes(guide.to_bytes(), len(vocabulary))
    for seed in range(3):
        generator = np.random.default_rng(seed)
        stop = [[end], [], [end, vocabulary.index(b"a")]][seed]
        theirs = XGrammarState(grammar, stop, len(vocabulary))
        ours = RegularState(guide, vocabulary, stop)
        for _ in range(25):
            may_come = allowed(ours, len(vocabulary))
            assert may_come == allowed(theirs, len(vocabulary))
            going_on = np.setdiff1d(may_come, stop)
            if not len(going_on):
                break
            # Short ones oftener: they stay within the pattern for longer.
            token_id = min((int(one) for one in generator.choice(going_on, 3)), key=lambda one: len(vocabulary[one]))
            for state in (theirs, ours):
                state.accept(token_id)
            assert ours.is_complete == theirs.is_complete


def test_schemas_have_an_automaton_where_they_count_far_and_can_have_one() -> None:
    def has_automaton(schema: dict[str, object]) -> bool:
        return regular_automaton(GuideKind.JSON_SCHEMA, json.dumps(schema)) is not None

    assert has_automaton({"type": "string", "maxLength": 129})
    assert not has_automaton({"type": "string", "maxLength": 100})  # xgrammar is quick there
    assert not has_automaton({"type": "object", "properties": {"a": {"type": "string", "maxLength": 129}, "b": {}}})
    assert regular_automaton(GuideKind.JSON_OBJECT, "") is None


def test_documents_of_a_schema_that_counts_far_are_valid(vocabulary: list[bytes]) -> None:
    pattern = r'^[^a-f.]{1,150}("|\\|\n)?x$'
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 140}, "name": {"type": "string", "pattern": pattern}},
        "required": ["text", "name"],
        "additionalProperties": False,
    }
    automaton = regular_automaton(GuideKind.JSON_SCHEMA, json.dumps(schema))
    assert automaton is not None
    guide = make_regular_guide(automaton, TokenTree.of(vocabulary))
    assert guide is not None
    lengths = []
    for seed in range(12):
        model = RandomModel(vocabulary, seed)
        output, is_over = model.generate(RegularState(guide, vocabulary, [2]))
        assert is_over
        document = json.loads(model.text(output))
        assert re.fullmatch(pattern, document["name"])
        lengths.append(len(document["text"]))
    assert max(lengths) <= 140
    assert len(set(lengths)) > 5


def test_equal_masks_are_kept_once_and_few_are_made(monkeypatch: pytest.MonkeyPatch, vocabulary: list[bytes]) -> None:
    made: list[int] = []
    mask = TokenTree.mask

    def counting(tree: TokenTree, automaton: Automaton, state: int) -> np.ndarray:
        made.append(state)
        return mask(tree, automaton, state)

    monkeypatch.setattr(TokenTree, "mask", counting)
    guide = guide_of("[a-z]{5,2000}", vocabulary)
    assert len(guide.automaton.moves) == 2002
    assert len(guide.masks) <= len(made) < 60
    assert guide.memory_size_bytes < 2**20


def test_too_many_masks_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton, tree = automaton_of("(ab)*c?"), TokenTree.of(WORDS)
    monkeypatch.setattr(guide_regular, "_MAX_LOOKUPS", 10)
    assert make_regular_guide(automaton, tree) is None
    monkeypatch.undo()
    monkeypatch.setattr(guide_regular, "_MAX_MASK_BYTES", 4)
    assert make_regular_guide(automaton, tree) is None


def test_stop_tokens_come_where_the_text_may_end_and_only_there() -> None:
    a, b, ab = 1, 2, 3
    state = RegularState(guide_of("(ab)+", WORDS), WORDS, [END, 6])
    assert allowed(state, len(WORDS)) == [a, ab, 5, 13]
    state.accept(a)
    assert allowed(state, len(WORDS)) == [b, 4]
    state.accept(b)
    assert allowed(state, len(WORDS)) == [END, a, ab, 5, 6, 13]
    assert not state.is_complete
    unending = RegularState(guide_of("(ab)+", WORDS), WORDS, [])
    unending.accept(ab)
    assert allowed(unending, len(WORDS)) == [a, ab, 5, 13]


@pytest.mark.parametrize(("stop", "token_id"), [([END], 6), ([END], END), ([END, 1], 1), ([], 0), ([], 12)])
def test_a_token_that_may_not_come_is_refused_and_changes_nothing(stop: list[int], token_id: int) -> None:
    state = RegularState(guide_of("(ab)+", WORDS), WORDS, stop)
    before = allowed(state, len(WORDS))
    with pytest.raises(ValueError, match=f"token {token_id} came where the guide does not allow it"):
        state.accept(token_id)
    assert allowed(state, len(WORDS)) == before
    state.accept(3)


def test_it_is_complete_where_only_an_end_may_follow() -> None:
    state = RegularState(guide_of("abab?", WORDS), WORDS, [END])
    state.accept(3)
    assert not state.is_complete
    state.accept(1)
    assert not state.is_complete
    state.accept(2)
    assert state.is_complete
    assert state.trouble is None
    assert allowed(state, len(WORDS)) == [END]


def test_a_text_that_the_model_has_no_tokens_for_is_a_dead_end() -> None:
    state = RegularState(guide_of("a(x|b)|az", [b"a", b"q"]), [b"a", b"q"], [])
    assert allowed(state, 2) == [0]
    state.accept(0)
    assert allowed(state, 2) == []
    assert not state.is_complete
    with pytest.raises(ValueError, match="no token at all"):
        state.accept(1)


def test_a_mask_in_the_start_is_that_of_the_automaton() -> None:
    guide = guide_of("a|b", WORDS)
    assert guide.masks[guide.mask_of[START]].tolist() == [0b110]
