"""The families of models by how they write calls, and the family of a chat template.

A :class:`ToolFamily` describes one family: the syntax of its calls, their spelling in a guide, the special tokens that must stay in
the text, and the marks that identify the family's chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvrelay.gateway.chat.structural_tag import Format, json_schema
from kvrelay.gateway.chat.tools.formats import dsml, envelopes, harmony, pythonic, sections, tagged
from kvrelay.gateway.chat.tools.parser import Syntax


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written: ``begin call separator call end``, where a call is ``before(name) arguments after``."""

    before: Callable[[str], str]
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    trigger: str | None = None  # the first text of a call, if nothing else begins with it
    arguments: Callable[[dict[str, Any]], Format] = json_schema  # makes a format from the schema of an object
    write_arguments: Callable[[str], str] = str  # rewrites JSON text
    arguments_are: str = "a JSON object"  # describes the arguments to a model that was not trained on calls

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model would write them. Each call has a name, and arguments in the family's own notation."""
        parts = [f"{self.before(name)}{arguments}{self.after}" for name, arguments in calls]
        return f"{self.begin}{self.separator.join(parts)}{self.end}"


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How one family of models calls functions."""

    name: str
    syntax: Syntax
    spelling: Spelling
    marks: tuple[str, ...]  # a chat template of this family has all of these
    strange_marks: tuple[str, ...] = ()  # and none of these
    kept_tokens: tuple[str, ...] = ()  # special tokens that the text must keep: the parser reads them
    # For families whose whole answer has a format of its own, thoughts included: makes the format from the calls' names
    # with the formats of
    # their arguments, and from the format of the content (None: there must be a call). ``syntax`` reads such answers with
    # or without tools.
    whole_answer: Callable[[Sequence[tuple[str, Format]], Format | None], Format] | None = None


def _envelope(arguments: str = "arguments") -> Callable[[str], str]:
    return lambda name: f'{{"name": {json.dumps(name)}, "{arguments}": '


_HERMES = ToolFamily(
    "hermes",
    envelopes.HERMES,
    Spelling(
        lambda name: f"{envelopes.BEGIN}\n{_envelope()(name)}",
        f"}}\n{envelopes.END}",
        separator="\n",
        trigger=envelopes.BEGIN,
    ),
    marks=(envelopes.BEGIN,),
    strange_marks=("]<]minimax[>[",),  # MiniMax-M3's calls begin like Hermes' but go on differently
    kept_tokens=(envelopes.BEGIN, envelopes.END),
)
_QWEN3_CODER = ToolFamily(
    "qwen3_coder",
    tagged.QWEN3_CODER.syntax,
    Spelling(
        lambda name: f"{tagged.BEGIN}\n{tagged.QWEN3_CODER.name}{name}>\n",
        f"\n{tagged.QWEN3_CODER.end}\n{tagged.END}",
        separator="\n",
        trigger=tagged.BEGIN,
        arguments=partial(json_schema, style="qwen_xml"),
        write_arguments=tagged.QWEN3_CODER.write_arguments,
        arguments_are="<parameter=KEY>VALUE</parameter> for each",
    ),
    marks=(tagged.BEGIN, tagged.QWEN3_CODER.name, tagged.QWEN3_CODER.key),
    kept_tokens=(tagged.BEGIN, tagged.END),
)
_GLM47 = ToolFamily(
    "glm47",
    tagged.GLM.syntax,
    Spelling(
        lambda name: f"{tagged.BEGIN}{name}",
        tagged.END,
        trigger=tagged.BEGIN,
        arguments=partial(json_schema, style="glm_xml"),
        write_arguments=tagged.GLM.write_arguments,
        arguments_are="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each",
    ),
    marks=(tagged.GLM.key, tagged.GLM.value),
    kept_tokens=(
        tagged.BEGIN, tagged.END, tagged.GLM.key, tagged.GLM.after_key, tagged.GLM.value, tagged.GLM.after_value
    ),
)  # fmt: skip
_LLAMA3_JSON = ToolFamily(
    "llama3_json",
    envelopes.LLAMA3,
    Spelling(_envelope("parameters"), "}", separator="; "),
    marks=("<|start_header_id|>", '"parameters"'),
    kept_tokens=(envelopes.PYTHON_TAG,),
)
_PYTHONIC = ToolFamily(
    "pythonic",
    pythonic.SYNTAX,
    Spelling(
        lambda name: f"{name}(",
        ")",
        begin="[",
        separator=", ",
        end="]",
        arguments=pythonic.keyword_arguments,
        write_arguments=pythonic.write_keywords,
        arguments_are="Python's keywords, such as a=1",
    ),
    marks=("[func_name1(",),
    kept_tokens=(pythonic.BEGIN, pythonic.END),
)
_LFM2 = ToolFamily(
    "lfm2",
    pythonic.SYNTAX,
    replace(
        _PYTHONIC.spelling,
        begin=f"{pythonic.LFM_BEGIN}[",
        end=f"]{pythonic.LFM_END}",
        trigger=pythonic.LFM_BEGIN,
    ),
    marks=(pythonic.LFM_BEGIN,),
    kept_tokens=(pythonic.LFM_BEGIN, pythonic.LFM_END),
)
_MISTRAL = ToolFamily(
    "mistral",
    envelopes.MISTRAL,
    Spelling(_envelope(), "}", begin=f"{envelopes.TOOL_CALLS}[", separator=", ", end="]", trigger=envelopes.TOOL_CALLS),
    marks=(envelopes.TOOL_CALLS,),
    kept_tokens=(envelopes.TOOL_CALLS, envelopes.CALL_ID, envelopes.ARGS),
)
_MISTRAL_ARGS = replace(
    _MISTRAL,
    name="mistral_args",
    spelling=Spelling(lambda name: f"{envelopes.TOOL_CALLS}{name}{envelopes.ARGS}", "", trigger=envelopes.TOOL_CALLS),
    marks=(envelopes.TOOL_CALLS, envelopes.ARGS),
)
_DEEPSEEK_V31 = ToolFamily(
    "deepseek_v31",
    sections.DEEPSEEK.syntax,
    Spelling(
        lambda name: f"{sections.DEEPSEEK.call_begin}{name}{sections.DEEPSEEK.arguments_begin}",
        sections.DEEPSEEK.call_end,
        begin=sections.DEEPSEEK.begin,
        end=sections.DEEPSEEK.end,
        trigger=sections.DEEPSEEK.begin,
    ),
    marks=(sections.DEEPSEEK.begin,),
    kept_tokens=sections.DEEPSEEK.tokens,
)
_DEEPSEEK_V32 = ToolFamily(
    "deepseek_v32",
    dsml.V32.syntax,
    Spelling(
        dsml.call_begin,
        f"\n{dsml.CALL_END}\n",
        begin=f"{dsml.V32.begin}\n",
        end=dsml.V32.end,
        trigger=dsml.V32.begin,
        arguments=partial(json_schema, style="deepseek_xml"),
        write_arguments=dsml.write_arguments,
        arguments_are=f'<{dsml.DSML}parameter name="KEY" string="true|false">VALUE</{dsml.DSML}parameter> for each',
    ),
    marks=(dsml.V32.begin,),
    kept_tokens=(dsml.DSML,),
)
_DEEPSEEK_V4 = replace(
    _DEEPSEEK_V32,
    name="deepseek_v4",
    syntax=dsml.V4.syntax,
    spelling=replace(_DEEPSEEK_V32.spelling, begin=f"{dsml.V4.begin}\n", end=dsml.V4.end, trigger=dsml.V4.begin),
    marks=(dsml.V4.begin,),
)
_KIMI_K2 = ToolFamily(
    "kimi_k2",
    sections.KIMI.syntax,
    Spelling(
        lambda name: f"{sections.KIMI.call_begin}{sections.PREFIX}{name}:",
        sections.KIMI.call_end,
        begin=sections.KIMI.begin,
        end=sections.KIMI.end,
        trigger=sections.KIMI.begin,
        arguments=sections.numbered_arguments,
        write_arguments=sections.write_numbered,
        arguments_are=f"a number, {sections.KIMI.arguments_begin} and a JSON object",
    ),
    marks=(sections.KIMI.begin, sections.KIMI.arguments_begin),
    kept_tokens=sections.KIMI.tokens,
)
_GPT_OSS = ToolFamily(
    "gpt_oss",
    harmony.SYNTAX,
    Spelling(harmony.call_begin, harmony.CALL, separator=f"{harmony.START}{harmony.SPEAKER}"),
    marks=(harmony.CHANNEL, harmony.MESSAGE),
    kept_tokens=harmony.TOKENS,
    whole_answer=harmony.answer,
)
# A template is compared with the families in this order: a family with more marks comes before one that has a part of them.
FAMILIES: dict[str, ToolFamily] = {
    family.name: family
    for family in (
        _DEEPSEEK_V31, _DEEPSEEK_V32, _DEEPSEEK_V4, _KIMI_K2, _GPT_OSS, _MISTRAL_ARGS, _MISTRAL, _QWEN3_CODER, _GLM47, _HERMES,
        _LFM2, _PYTHONIC, _LLAMA3_JSON,
    )
}  # fmt: skip
FALLBACK = _HERMES  # for models whose template shows no format: the format that most models know


def family_for(chat_template: str) -> ToolFamily | None:
    """The family that a chat template belongs to; None if the template shows no calls of a known family."""
    for family in FAMILIES.values():
        has_strange = any(mark in chat_template for mark in family.strange_marks)
        if not has_strange and all(mark in chat_template for mark in family.marks):
            return family
    return None
