"""Grammars in GBNF match what their text says, character by character, wherever lexemes could have taken too much."""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import GuideKind
from kvrelay.engine.guidance import GuideRefusal
from kvrelay.engine.guide_compiler import GrammarCompiler
from kvrelay.engine.guide_ebnf import read_grammar
from kvrelay.engine.guide_errors import UnsupportedGuideError

from .guided import compiled, has_end

JSON = r"""# as in llama.cpp
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"', ["1", "(1+2)+3"], ["", "1+", "(1"]),
        ('root ::= "a" root | [0-9]', ["aa1"], ["a", "1a"]),  # a loop at its end
        ("root ::= root [0-9] | [a-z]", ["a12"], ["1"]),  # and at its beginning
        # [a-z]+ would take the b
        ('root ::= "(" root ")" | word " and " word\nword ::= [a-z ]+', ["a b and c", "(x and and and y)"], ["a b c"]),
        ('root ::= x "b"\nx ::= [a-z]+ | "(" x ")"', ["ab", "bbb", "(a)b"], ["b", "a"]),  # [a-z]+ would take the b
        ('root ::= "a" root "b" | "aa" | "ab"', ["aa", "aabb", "aaab"], ["a", "aab"]),
        (
            JSON,
            ['{"a": [1, -2.5e3, true], "b": {}}', '{ "a":{"b":"\\u00e4"}\n}'],
            ["[]", '{"a"}', '{"a": 01}', '{"a": 1'],
        ),
        ('root ::= [äö]{2} "\\u00e4"? | [^a-z]', ["äöä", "öö", "\n"], ["ää ", "a"]),
        ("root ::= [a\\-z]+\n | x\nx ::= [^\\]]", ["a-z", "-", "b"], ["]", "ab"]),
        ('root-1 ::= "a"\nroot ::= (root-1 | "b"){2,3} # twice or thrice\n', ["ab", "bab"], ["a", "abab"]),
        ('root ::= ""', [""], ["a"]),
    ],
)
def test_a_grammar_matches_what_it_says(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], grammar: str, good: list[str], bad: list[str]
) -> None:
    for text, is_good in [*((one, True) for one in good), *((one, False) for one in bad)]:
        state = compiled(guide_compiler, GuideKind.GRAMMAR, grammar)
        assert not isinstance(state, GuideRefusal), state.detail
        assert has_end(state, vocabulary, text) is is_good, text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("x ::= [a-z]", "no rule 'root'"),
        ("root ::= x", "no rule 'x'"),
        ("root = x", "cannot be read at '= x'"),
        ('root ::= "a', "cannot be read"),
        ('root ::= ("a"', "a '(' without its ')'"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "a set of no characters"),
        ('root ::= "a"{3,2}', "which is no range"),
        ('root ::= "\\q"', "which is no character"),
        ("root ::= " + "(" * 200, "more than 100 parentheses"),
        ('root ::= * "a"', "'*' where a part must stand"),
        ('root ::= "a" )', "')' where a rule's name must stand"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(grammar: str, reason: str) -> None:
    with pytest.raises(UnsupportedGuideError) as refused:
        read_grammar(grammar)
    assert reason in str(refused.value)
