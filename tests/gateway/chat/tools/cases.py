"""Common parts of the tests of tools: strategies for functions and calls, and functions that read and join answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from kvrelay.gateway.chat.tools.calls import CallIds, ParsedDelta, Part, Said, Thought, ToolCallDelta
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.parser import CallParser

# Texts that could confuse a parser in the wrong place.
FRAGMENTS = (
    *sorted({token for family in FAMILIES.values() for token in family.kept_tokens}),
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *('{"name": "f", "arguments": ', '{"name": "f"', '"parameters": {', '{"a": 1}', '"}', "}", "{", "[", "]", "(", ")", ";", ","),
    *("f(a=1", "f(", "[f(a='", "g()]", "f", "g", "function", "\\", '"', "'", "\n", " ", "1", "-", "e", "tru", "true", "é", "<"),
)  # fmt: skip

NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
KEYS = st.one_of(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.sampled_from(["größe", "naïve_key"]))
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4)
CUTS = st.lists(st.integers(1, 30), max_size=40)


@dataclass
class Answer:
    """The output of a parser, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # (id, name, arguments)

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        """(name, arguments) of each call; raises ValueError on arguments that are not JSON."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def numbered_ids() -> CallIds:
    """Call ids id0, id1, and so on."""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def choice_of(functions: Iterable[Function], mode: ToolMode = ToolMode.AUTO, **more: Any) -> ToolChoice:
    """A tool choice of these functions."""
    chosen = tuple(functions)
    return ToolChoice(mode=mode, functions=chosen, shown=chosen, **more)


def names_choice(*names: str, **more: Any) -> ToolChoice:
    """A tool choice of functions that take any arguments."""
    return choice_of([Function(name=name) for name in dict.fromkeys(names)], **more)


def parser_of(family: ToolFamily, choice: ToolChoice) -> CallParser:
    """A parser with numbered call ids."""
    return CallParser(family.syntax, choice, numbered_ids())


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """``text`` in pieces of these lengths. The rest is the last piece."""
    ends = [0, *itertools.accumulate(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(min(end, len(text)) for end in ends) if start < end]


def put_together(deltas: Iterable[ParsedDelta]) -> Answer:
    """Join a stream's deltas as OpenAI's client does, and check that the stream is well-formed."""
    answer = Answer()
    previous: Part | None = None
    for part in (part for delta in deltas for part in delta.parts):
        match part:
            case Said():
                answer.content += part.text
            case Thought():
                answer.reasoning += part.text
            case ToolCallDelta() if part.index == len(answer.calls):
                assert part.id is not None, "the first delta of a call has its id"
                assert part.name, "and its name"
                answer.calls.append((part.id, part.name, part.arguments))
            case ToolCallDelta():
                assert isinstance(previous, ToolCallDelta), "nothing comes between the pieces of a call"
                assert part.index == previous.index == len(answer.calls) - 1, "calls come one after the other"
                assert part.id is None and part.name is None, "id and name come once"  # noqa: PT018
                assert part.arguments, "no delta says nothing"
                call_id, name, arguments = answer.calls[-1]
                answer.calls[-1] = (call_id, name, arguments + part.arguments)
        previous = part
    return answer


def read(parser: CallParser, pieces: Iterable[str]) -> Answer:
    """The joined output of ``parser`` for these pieces."""
    return put_together([*(parser.push(piece) for piece in pieces), parser.finish()])


def kind_of(value: Any) -> str:
    """The type of a value in JSON Schema."""
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def functions_of(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Function]:
    """A function for each call, with a schema that fits its arguments."""
    return [
        Function(
            name=name,
            parameters={
                "type": "object",
                "properties": {key: {"type": kind_of(value)} for key, value in arguments.items()},
            },
        )
        for name, arguments in calls
    ]
