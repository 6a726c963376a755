"""From a guide's text to a grammar in llguidance's dialect of Lark.

JSON comes out on one line, as ``json.dumps`` writes it.
"""

from __future__ import annotations

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.engine.guide_errors import UnsupportedGuideError
from kvrelay.engine.guide_lark import Lark, Part, constant, pattern
from kvrelay.engine.guide_lexemes import add_grammar
from kvrelay.engine.guide_schema import followable, parse_json
from kvrelay.engine.guide_tags import add_format


def lark_of(guide: Guide) -> str:
    """The grammar. Raises UnsupportedGuideError; what llguidance does not take, it says itself."""
    lark = Lark()
    return lark.grammar(_root(lark, guide))


def _root(lark: Lark, guide: Guide) -> Part:
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return lark.json(followable({"type": "object"}))
        case GuideKind.JSON_SCHEMA:
            return lark.json(followable(parse_json(guide.text, "the schema")))
        case GuideKind.REGEX:
            return pattern(guide.text)
        case GuideKind.GRAMMAR:
            return add_grammar(lark, guide.text)
        case GuideKind.CHOICE:
            choices = parse_json(guide.text, "the list of choices")
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise UnsupportedGuideError("the choices must be a list of at least one string")
            return lark.either([constant(choice) for choice in choices])
        case GuideKind.STRUCTURAL_TAG:
            tag = parse_json(guide.text, "the structural tag")
            if not isinstance(tag, dict) or "format" not in tag:
                raise UnsupportedGuideError('a structural tag is {"type": "structural_tag", "format": {…}}')
            return add_format(lark, tag["format"])
