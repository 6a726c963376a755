"""Automata against Python's regular expressions, character by character of UTF-8, and their limits."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import xgrammar as xgr

from kvrelay.engine import guide_automaton
from kvrelay.engine.guide_automaton import DEAD, START, Automaton, NoAutomatonError, build_automaton
from kvrelay.engine.guide_rules import Characters, Repeat, Rules, Series, read_rules


def automaton_of(pattern: str) -> Automaton:
    return build_automaton(read_rules(xgr.Grammar.from_regex(pattern).serialize_json()))


def automaton_of_grammar(grammar: str) -> Automaton:
    return build_automaton(read_rules(xgr.Grammar.from_ebnf(grammar).serialize_json()))


def state_behind(automaton: Automaton, text: bytes) -> int:
    state = START
    for byte in text:
        state = int(automaton.moves[state, automaton.columns[byte]])
    return state


def matches(automaton: Automaton, text: str) -> bool:
    return bool(automaton.may_end[state_behind(automaton, text.encode())])


def random_pattern(generator: random.Random, depth: int) -> str:
    kind = generator.randrange(8 if depth else 3)
    if kind < 2:
        return generator.choice("abcé€")
    if kind == 2:
        return generator.choice(["[ab]", "[^a]", "[b-é]", r"\\w", "[^a-b€]", "[€-😀]"]).replace(r"\\w", "[a-z]")
    inner = random_pattern(generator, depth - 1)
    if kind == 3:
        return f"({inner}|{random_pattern(generator, depth - 1)})"
    if kind == 4:
        return f"({inner}){generator.choice('*+?')}"
    if kind == 5:
        least = generator.randrange(3)
        return f"({inner}){{{least},{generator.choice(['', least, least + 2])}}}"
    return inner + random_pattern(generator, depth - 1)


def random_text(generator: random.Random, automaton: Automaton) -> str:
    """A walk through the automaton, so that it often matches, and sometimes with an error in it."""
    text, state = b"", START
    for _ in range(generator.randrange(12)):
        while True:  # a character, all of it
            alive = [byte for byte in range(256) if automaton.moves[state, automaton.columns[byte]] != DEAD]
            if not alive:
                return text.decode()
            byte = generator.choice(alive)
            state = int(automaton.moves[state, automaton.columns[byte]])
            text += bytes([byte])
            try:
                text.decode()
            except UnicodeDecodeError:
                continue
            break
        if generator.random() < 0.2 and automaton.may_end[state]:
            break
    decoded = text.decode()
    if decoded and generator.random() < 0.3:
        place = generator.randrange(len(decoded))
        decoded = decoded[:place] + generator.choice("abcdé€😀\n") + decoded[place + generator.randrange(2) :]
    return decoded


def test_random_patterns_match_what_they_match_in_python() -> None:
    num_matches = num_texts = 0
    for seed in range(300):
        generator = random.Random(seed)
        pattern = random_pattern(generator, 4)
        automaton = automaton_of(pattern)
        python = re.compile(pattern)
        for _ in range(12):
            text = random_text(generator, automaton)
            expected = python.fullmatch(text) is not None
            assert matches(automaton, text) == expected, (pattern, text)
            num_matches += expected
            num_texts += 1
    assert 0.2 < num_matches / num_texts < 0.8


@pytest.mark.parametrize("seed", range(5))
def test_a_set_of_characters_is_those_bytes_and_no_others(seed: int) -> None:
    generator = random.Random(seed)
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF]
    picked = sorted(
        generator.choice(edges) if generator.random() < 0.3 else generator.randrange(0x110000) for _ in range(8)
    )
    ranges = tuple(zip(picked[::2], picked[1::2], strict=True))
    automaton = build_automaton(Rules((Characters(ranges),), 0))
    near = {code + offset for code in (*picked, *edges) for offset in (-65, -64, -1, 0, 1, 64, 65)}
    near |= {generator.randrange(0x110000) for _ in range(2000)}
    for code in near:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            inside = any(low <= code <= high for low, high in ranges)
            assert matches(automaton, chr(code)) == inside, hex(code)
    for broken in (b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xe0\x80\x80"):
        assert state_behind(automaton, broken) == DEAD


def test_from_every_state_but_the_dead_one_an_end_can_be_reached() -> None:
    automaton = automaton_of(r"(ab{2,4}|[^c]{3}d)*x")
    leads = automaton.may_end.copy()
    for _ in automaton.may_end:
        leads |= leads[automaton.moves].any(axis=1)
    assert not automaton.may_end[DEAD]
    assert leads.tolist() == [False] + [True] * (len(leads) - 1)
    nowhere = automaton_of_grammar('root ::= "a" x | "b"\nx ::= "c" x')
    assert state_behind(nowhere, b"a") == DEAD
    assert matches(nowhere, "b")


def test_a_zero_byte_is_a_character() -> None:
    for automaton in (
        automaton_of_grammar('root ::= "a\\0b"'),
        automaton_of(r"a\x00?b"),
        automaton_of(r"a[\x00-\x01]b"),
    ):
        assert matches(automaton, "a\0b")
        assert state_behind(automaton, b"a\0\0") == DEAD


def test_rules_that_end_with_themselves_or_each_other_are_loops() -> None:
    automaton = automaton_of_grammar('root ::= "" | "a" other\nother ::= "b" root | "c"')
    assert [matches(automaton, text) for text in ("", "ab", "abab", "abac", "ac", "a", "aba", "acb")] == [
        *[True] * 5,
        *[False] * 3,
    ]


def test_nothing_may_be_repeated_as_often_as_one_likes() -> None:
    automaton = build_automaton(Rules((Repeat(Repeat(Series(()), 10**12, 10**12), 10**12, 10**12),), 0))
    assert matches(automaton, "")
    assert state_behind(automaton, b"a") == DEAD


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "(" root ")" | "a"', "contains itself"),
        ('root ::= root "a" | "a"', "contains itself"),
        ('root ::= "a" other\nother ::= root "b"', "contains itself"),
        ('root ::= "a" root', "nothing matches"),
        ("root ::= [a]{1000,100000}", "more than 50000 parts"),
        ("root ::= [ab]* [a] [ab]{16,16}", "more than 16384 states"),
        ("root ::= x{700,700}\nx ::= y{0,12}\ny ::= [a]", "too long to make"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(200)) + 'r200 ::= "a"', "deep"),
    ],
)
def test_what_has_no_automaton(grammar: str, reason: str) -> None:
    with pytest.raises(NoAutomatonError, match=reason):
        automaton_of_grammar(grammar)


def test_the_number_of_states_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = automaton_of("[a-z]{5,9}")
    assert automaton.moves.dtype == np.uint16
    assert len(automaton.moves) == 11
    monkeypatch.setattr(guide_automaton, "_MAX_STATES", 10)
    with pytest.raises(NoAutomatonError):
        automaton_of("[a-z]{5,9}")
