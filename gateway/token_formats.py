"""Guides that name special tokens: what a structural tag has as text, where it is a special token's name, becomes that token.

Workers give special tokens no text that a grammar could match, lest one of them stands in a JSON string, say. So a marker that is a
special token of the model's (``[TOOL_CALLS]``, ``<|channel|>``) must be told by its id: no model writes it letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvrelay.gateway.structural_tag import Format, const, either, sequence, star


def with_tokens(part: Format, token_ids: Mapping[str, int]) -> Format:
    """``part`` with these special tokens, ids by names, where it has their names as text.

    Formats that :mod:`kvrelay.gateway.structural_tag` does not make, as a client's own, are left alone.
    """
    return dict(_Rewriter(token_ids).rewritten(part)) if token_ids else part


class _Rewriter:
    """Knows the tokens."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._names = re.compile("(" + "|".join(re.escape(name) for name in longest_first) + ")")

    def rewritten(self, old: Any) -> Any:
        """A format, or whatever a client has in the place of one."""
        new = old
        match old:
            case {"type": "const_string", "value": str() as text} if text:
                new = sequence(*self._pieces(text))
            case {"type": "sequence" | "or", "elements": list() as elements}:
                new = {**old, "elements": [self.rewritten(element) for element in elements]}
            case {"type": "optional" | "star", "content": content}:
                new = {**old, "content": self.rewritten(content)}
            case {"type": "tag", "begin": str(), "end": str()}:
                new = self._tag(old)
            case {"type": "tags_with_separator", "tags": list(), "separator": str()}:
                new = self._tags(old)
            # Others are a client's own, and may say what a token_dispatch cannot.
            case {"type": "dispatch", "rules": [[str() as trigger, _]]} if trigger and old.keys() <= {
                "type",
                "rules",
                "loop",
            }:
                new = self._dispatch(old)
        return new

    def _pieces(self, text: str) -> list[Format]:
        found = [piece for piece in self._names.split(text) if piece]
        ids = self._token_ids
        return [{"type": "token", "token": ids[piece]} if piece in ids else const(piece) for piece in found]

    def _tag(self, old: Format) -> Format:
        """A tag begins and ends with a text or with a token; what is between that and the content becomes a part of the content."""
        begin, end = self._pieces(old["begin"]), self._pieces(old["end"])
        first = begin.pop(0) if begin else const("")
        last = end.pop() if end else const("")
        parts = [*begin, self.rewritten(old["content"]), *end]
        content = sequence(*parts) if len(parts) > 1 else parts[0]
        return {**old, "begin": _text_or_token(first), "content": content, "end": _text_or_token(last)}

    def _tags(self, old: Format) -> Format:
        items, separator = [self.rewritten(item) for item in old["tags"]], self._pieces(old["separator"])
        if all(piece["type"] == "const_string" for piece in separator):
            return {**old, "tags": items}
        if old.get("stop_after_first"):
            return either(items)
        return sequence(either(items), star(sequence(*separator, either(items))))

    def _dispatch(self, old: Format) -> Format:
        [(trigger, content)] = old["rules"]
        first, *rest = self._pieces(trigger)
        if first["type"] != "token":
            return {**old, "rules": [[trigger, self.rewritten(content)]]}
        rule = [first["token"], sequence(*rest, self.rewritten(content))]
        others = sorted(set(self._token_ids.values()) - {first["token"]})  # markers, too, which begin nothing here
        return {"type": "token_dispatch", "rules": [rule], "loop": old.get("loop", True), "exclude_tokens": others}


def _text_or_token(piece: Format) -> str | Format:
    return piece if piece["type"] == "token" else str(piece["value"])
