"""From a guide's text to an automaton or an xgrammar grammar, in the compiling process.

JSON comes out on one line, as ``json.dumps`` writes it. Free whitespace is not allowed: a model that may write a line break after
every token sometimes never stops doing so.
"""

from __future__ import annotations

import json
from typing import Any

import xgrammar as xgr

from kvrelay.common.sampling import GuideKind
from kvrelay.engine.guide_automaton import Automaton, NoAutomatonError, build_automaton
from kvrelay.engine.guide_errors import UnsupportedGuideError
from kvrelay.engine.guide_rules import UnknownGrammarError, read_rules
from kvrelay.engine.guide_schema import followable, followable_schema, parse_json

_UNROLLED = 128  # what is counted further is no set of states to xgrammar, but checked token by token


def compile_guide(compiler: xgr.GrammarCompiler, kind: GuideKind, text: str) -> xgr.CompiledGrammar:
    """Compile a guide. Raises UnsupportedGuideError on a bad one, RuntimeError from xgrammar on what it does not take."""
    match kind:
        case GuideKind.JSON_OBJECT:
            return compiler.compile_json_schema('{"type": "object"}', any_whitespace=False)
        case GuideKind.JSON_SCHEMA:
            return compiler.compile_json_schema(followable_schema(text), any_whitespace=False)
        case GuideKind.REGEX:
            return compiler.compile_regex(text)
        case GuideKind.GRAMMAR:
            return compiler.compile_grammar(text)
        case GuideKind.CHOICE:
            return compiler.compile_grammar(_choice_grammar(text))
        case GuideKind.STRUCTURAL_TAG:
            tag = parse_json(text, "the structural tag")
            return compiler.compile_structural_tag(json.dumps(_with_followable_schemas(tag)))


def regular_automaton(kind: GuideKind, text: str) -> Automaton | None:
    """The automaton of a guide; None where there is none, or xgrammar follows the guide as fast.

    It does so with choices and most schemas, but not with counts within counts, nor with a ``maxLength`` beyond what it unrolls
    (some 13 ms a mask). Raises UnsupportedGuideError, and RuntimeError from xgrammar, on what is not taken.
    """
    match kind:
        case GuideKind.REGEX:
            grammar = xgr.Grammar.from_regex(text)
        case GuideKind.GRAMMAR:
            grammar = xgr.Grammar.from_ebnf(text)
        case GuideKind.JSON_SCHEMA:
            grammar = xgr.Grammar.from_json_schema(followable_schema(text), any_whitespace=False)
        case _:
            return None
    try:
        rules = read_rules(grammar.serialize_json(), is_of_schema=kind is GuideKind.JSON_SCHEMA)
        if kind is GuideKind.JSON_SCHEMA and rules.most_counted <= _UNROLLED:
            return None
        return build_automaton(rules)
    except (UnknownGrammarError, NoAutomatonError):
        return None
    except (
        ValueError,
        LookupError,
        TypeError,
    ):  # written otherwise than we read it: that must not refuse what xgrammar takes
        return None


def _choice_grammar(text: str) -> str:
    choices = parse_json(text, "the list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise UnsupportedGuideError("the choices must be a list of at least one string")
    # Character by character, so that no text is taken for a part of the grammar.
    literals = ["".join(f"\\U{ord(character):08x}" for character in choice) for choice in choices]
    return "root ::= " + " | ".join(f'"{literal}"' for literal in literals)


def _with_followable_schemas(format_: Any) -> Any:
    """The structural tag with the JSON Schemas in it rewritten. In other styles than JSON they are only looked at."""
    if isinstance(format_, list):
        return [_with_followable_schemas(inner) for inner in format_]
    if not isinstance(format_, dict):
        return format_
    if format_.get("type") == "json_schema" and "json_schema" in format_:
        rewritten = followable(format_["json_schema"])
        return {**format_, "json_schema": rewritten} if format_.get("style", "json") == "json" else format_
    return {name: _with_followable_schemas(inner) for name, inner in format_.items()}
