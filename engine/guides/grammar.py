"""Turns a guide into a grammar in llguidance's dialect of Lark.

JSON is written on one line, as ``json.dumps`` does. A structural tag describes text by nested formats, in the JSON of xgrammar 0.2
that vLLM takes; see https://xgrammar.mlc.ai/docs for each format. A format that cannot be followed is refused by name. Free text in
a tag ends before the tag's first end; free text that waits for a trigger ends before the first trigger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.engine.guides.lark import Lark, Part, constant, pattern, text_without, tokens
from kvrelay.engine.guides.parameters import STYLES, parameters
from kvrelay.engine.guides.schema import followable, parse_json

_MAX_DEPTH = 64  # nesting depth of formats
_MAX_LEN = 2**22  # characters of a grammar, of which a sequence's state takes up to eight bytes each


def lark_of(guide: Guide, special_ids: Mapping[str, int]) -> str:
    """The grammar for llguidance. ``special_ids``: the ids of the model's special tokens by name.

    Raises UnsupportedGuideError, or ValueError if llguidance's converter refuses the guide.
    """
    lark = Lark()
    grammar = lark.grammar(_root(lark, guide, special_ids))
    if len(grammar) > _MAX_LEN:
        raise UnsupportedGuideError(f"it becomes a grammar of {len(grammar)} characters; at most {_MAX_LEN} may be")
    return grammar


def _root(lark: Lark, guide: Guide, special_ids: Mapping[str, int]) -> Part:
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return lark.json(followable({"type": "object"}))
        case GuideKind.JSON_SCHEMA:
            return lark.json(followable(parse_json(guide.text, "the schema")))
        case GuideKind.REGEX:
            return pattern(guide.text)
        case GuideKind.GRAMMAR:
            return lark.clients(guide.text)
        case GuideKind.CHOICE:
            choices = parse_json(guide.text, "the list of choices")
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise UnsupportedGuideError("the choices must be a list of at least one string")
            return lark.either([constant(choice) for choice in choices])
        case GuideKind.STRUCTURAL_TAG:
            tag = parse_json(guide.text, "the structural tag")
            if not isinstance(tag, dict) or "format" not in tag:
                raise UnsupportedGuideError('a structural tag is {"type": "structural_tag", "format": {…}}')
            try:
                names = [_text(name) for name in tag.get("special_tokens", ()) if name in special_ids]
                return _Formats(lark, {name: special_ids[name] for name in names}).part(tag["format"], (), 0)
            except (KeyError, TypeError, AttributeError) as error:
                raise UnsupportedGuideError(f"the structural tag is malformed: {error!r}") from error


class _Formats:
    """Converts formats to parts of a grammar. ``stops``: texts at which free text ends, because they end an enclosing tag.

    Special tokens are not text, and no text in a grammar matches them; otherwise one could stand in a JSON string. So where a
    format has the name of a special token (``[TOOL_CALLS]``, ``<|channel|>``), the grammar asks for it by its id. A special token
    ends all free text.
    """

    def __init__(self, lark: Lark, special_ids: Mapping[str, int]) -> None:
        self._lark = lark
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._names = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def part(self, format_: Any, stops: tuple[str, ...], depth: int) -> Part:  # noqa: PLR0912, PLR0915 - one for each kind
        if depth > _MAX_DEPTH:
            raise UnsupportedGuideError(f"formats are nested deeper than {_MAX_DEPTH}")
        kind, given = format_["type"], {name: value for name, value in format_.items() if name != "type"}
        lark, inner = self._lark, partial(self.part, stops=stops, depth=depth + 1)
        taken: tuple[str, ...] = ()
        match kind:
            case "const_string":
                taken, part = ("value",), self._literal(given["value"])
            case "json_schema":
                taken, part = ("json_schema", "style", "max_whitespace_cnt"), self._json(given)
            case "qwen_xml_parameter":
                taken, part = ("json_schema",), parameters(lark, given["json_schema"], "qwen_xml", self._literal)
            case "regex":
                taken, part = ("pattern",), pattern(_text(given["pattern"]))
            case "grammar":
                taken, part = ("grammar",), lark.clients(_text(given["grammar"]))
            case "any_text":
                taken, part = ("excludes",), text_without([*stops, *map(_text, given.get("excludes", ()))])
            case "token":
                taken, part = ("token",), tokens(_ids([given["token"]]))
            case "exclude_token" | "any_tokens":
                one = tokens("^" + _ids(given["exclude_tokens"]) if given.get("exclude_tokens") else "*")
                taken, part = ("exclude_tokens",), one if kind == "exclude_token" else lark.repeat(one, 0, None)
            case "sequence":
                taken, part = ("elements",), lark.sequence([inner(one) for one in given["elements"]])
            case "or":
                taken, part = ("elements",), lark.either([inner(one) for one in given["elements"]])
            case "optional" | "star" | "plus":
                least, most = int(kind == "plus"), 1 if kind == "optional" else None
                taken, part = ("content",), lark.repeat(inner(given["content"]), least, most)
            case "repeat":
                most = None if given["max"] == -1 else int(given["max"])
                taken, part = ("content", "min", "max"), lark.repeat(inner(given["content"]), int(given["min"]), most)
            case "tag":
                taken, part = ("begin", "content", "end"), self._tag(given, depth)
            case "tags_with_separator":
                taken = ("tags", "separator", "at_least_one", "stop_after_first")
                part = self._separated(given, [inner(one) for one in given["tags"]])
            case "dispatch" | "token_dispatch":
                taken = ("rules", "loop", "excludes" if kind == "dispatch" else "exclude_tokens")
                rules = [(trigger, inner(content)) for trigger, content in given["rules"]]
                part = self._dispatch(rules, given, stops, is_one=not given.get("loop", True))
            case "triggered_tags" | "token_triggered_tags":
                is_text = kind == "triggered_tags"
                name = "triggers" if is_text else "trigger_tokens"
                taken = (name, "tags", "at_least_one", "stop_after_first", "excludes" if is_text else "exclude_tokens")
                rules = [rule for one in given[name] for rule in self._triggered(one, given["tags"], depth)]
                part = self._dispatch(rules, given, stops, is_one=bool(given.get("stop_after_first")))
                if given.get("at_least_one"):
                    first = lark.either([inner(one) for one in given["tags"]])
                    part = first if given.get("stop_after_first") else lark.sequence([first, part])
            case _:
                raise UnsupportedGuideError(
                    f"the structural tag has a format of the type {str(kind)[:80]!r}, which is not known"
                )
        if odd := [name for name in given if name not in taken and given[name] not in (None, False, [])]:
            raise UnsupportedGuideError(f"{odd[0]!r} of the format {kind} cannot be kept")
        return part

    def _json(self, given: dict[str, Any]) -> Part:
        style = given.get("style", "json")
        if style in STYLES:
            return parameters(self._lark, given["json_schema"], style, self._literal)
        if style != "json":
            raise UnsupportedGuideError(
                f"the style {str(style)[:80]!r} of a json_schema is not known; json and {', '.join(STYLES)} are"
            )
        return self._lark.json(followable(given["json_schema"], is_spaced=True))

    def _tag(self, given: dict[str, Any], depth: int, without: str = "") -> Part:
        """``without``: the part of the beginning that was already there."""
        begin, end = given["begin"], given["end"]
        first = self._edge(begin if isinstance(begin, dict) else _text(begin).removeprefix(without))
        ends = end if isinstance(end, list) else [end]
        last = self._lark.either([self._edge(one) for one in ends])
        stops = tuple(one for one in ends if isinstance(one, str) and one and not self._has_token(one))
        return self._lark.sequence([first, self.part(given["content"], stops, depth + 1), last])

    def _edge(self, edge: Any) -> Part:
        return tokens(_ids([edge["token"]])) if isinstance(edge, dict) else self._literal(edge)

    def _literal(self, text: Any) -> Part:
        """Exactly this text; names of special tokens in it stand for the tokens."""
        if not self._has_token(_text(text)):
            return constant(text)
        pieces = [piece for piece in self._names.split(text) if piece]
        ids = self._special_ids
        return self._lark.sequence([tokens(str(ids[piece])) if piece in ids else constant(piece) for piece in pieces])

    def _has_token(self, text: str) -> bool:
        return bool(self._special_ids) and self._names.search(text) is not None

    def _separated(self, given: dict[str, Any], items: list[Part]) -> Part:
        one = self._lark.either(items)
        if given.get("stop_after_first"):
            found = one
        else:
            more = self._lark.sequence([self._literal(given["separator"]), one])
            found = self._lark.sequence([one, self._lark.repeat(more, 0, None)])
        return found if given.get("at_least_one") else self._lark.repeat(found, 0, 1)

    def _triggered(self, trigger: Any, tags: list[dict[str, Any]], depth: int) -> Iterable[tuple[Any, Part]]:
        for tag in tags:
            begin = tag["begin"]
            if isinstance(begin, str) and begin.startswith(_text(trigger)):
                yield trigger, self._tag(tag, depth + 1, without=trigger)
            elif isinstance(begin, dict) and begin["token"] == trigger:
                yield trigger, self._tag({**tag, "begin": ""}, depth + 1)

    def _dispatch(
        self, rules: list[tuple[Any, Part]], given: dict[str, Any], stops: tuple[str, ...], *, is_one: bool
    ) -> Part:
        """Free text in which each trigger is followed by its content."""
        triggers = [trigger for trigger, _ in rules]
        words = [trigger for trigger in triggers if isinstance(trigger, str) and not self._has_token(trigger)]
        ids = [trigger for trigger in triggers if not isinstance(trigger, str)]
        excluded = [*ids, *given.get("exclude_tokens", ())]
        text = text_without([*words, *stops, *map(_text, given.get("excludes", ()))])
        if excluded:
            text = self._lark.repeat(tokens("^" + _ids(excluded)), 0, None) if not words and not stops else text
        begin = {one: self._literal(one) if isinstance(one, str) else tokens(_ids([one])) for one in triggers}
        taken = [self._lark.sequence([text, begin[trigger], content]) for trigger, content in rules]
        if not taken:
            return text
        if is_one:
            return self._lark.either([*taken, text])
        return self._lark.sequence([self._lark.repeat(self._lark.either(taken), 0, None), text])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]} is not a string")
    return value


def _ids(token_ids: Iterable[Any]) -> str:
    found = list(token_ids)
    if not all(type(token_id) is int and token_id >= 0 for token_id in found):
        raise UnsupportedGuideError(f"tokens must be named by their ids, not {str(found)[:80]}")
    return ",".join(map(str, found))
