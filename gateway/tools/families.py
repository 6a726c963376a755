"""The families of models by how they write calls, and which of them a chat template belongs to.

A :class:`ToolFamily` is all that one needs to know of a family: how its calls are read (a parser's syntax), how a guide spells
them, which special tokens must stay in the text, and what in a chat template gives it away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.gateway.structural_tag import Format, json_schema
from kvrelay.gateway.tools import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    python_guide,
    pythonic,
    qwen3_coder,
)  # fmt: skip
from kvrelay.gateway.tools.parser import Syntax


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written: ``begin call separator call end``, a call being ``before(name) arguments after``."""

    before: Callable[[str], str]
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    trigger: str | None = None  # the first text of a call, if it is never the first text of anything else
    arguments: Callable[[dict[str, Any]], Format] = json_schema  # from the schema of an object
    write_arguments: Callable[[str], str] = str  # from JSON text
    arguments_are: str = "a JSON object"  # in words, for a model that never saw any

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each with its name and its arguments as they are to stand there, as the model would write them."""
        parts = [f"{self.before(name)}{arguments}{self.after}" for name, arguments in calls]
        return f"{self.begin}{self.separator.join(parts)}{self.end}"


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How one family of models calls functions."""

    name: str
    syntax: Syntax
    spelling: Spelling
    marks: tuple[str, ...]  # a chat template that has them all is of this family …
    strange_marks: tuple[str, ...] = ()  # … unless it has one of these
    kept_tokens: tuple[str, ...] = ()  # special tokens that the text must keep: the parser reads them
    # Where all of an answer has a format of its own, thoughts included: from the formats of calls' arguments by their names, and
    # of the content (None: there must be a call). Such answers are read by ``syntax`` with or without tools.
    whole_answer: Callable[[Sequence[tuple[str, Format]], Format | None], Format] | None = None


def _envelope(arguments: str = "arguments") -> Callable[[str], str]:
    return lambda name: f'{{"name": {json.dumps(name)}, "{arguments}": '


_HERMES = ToolFamily(
    "hermes",
    hermes.SYNTAX,
    Spelling(
        lambda name: f"{hermes.BEGIN}\n{_envelope()(name)}", f"}}\n{hermes.END}", separator="\n", trigger=hermes.BEGIN
    ),
    marks=(hermes.BEGIN,),
    strange_marks=("]<]minimax[>[",),  # of MiniMax-M3, whose calls only begin alike
    kept_tokens=(hermes.BEGIN, hermes.END),
)
_QWEN3_CODER = ToolFamily(
    "qwen3_coder",
    qwen3_coder.SYNTAX,
    Spelling(
        lambda name: f"{qwen3_coder.BEGIN}\n{qwen3_coder.FUNCTION}{name}>\n",
        f"\n{qwen3_coder.FUNCTION_END}\n{qwen3_coder.END}",
        separator="\n",
        trigger=qwen3_coder.BEGIN,
        arguments=lambda schema: json_schema(schema, style="qwen_xml"),
        write_arguments=qwen3_coder.write_arguments,
        arguments_are="<parameter=KEY>VALUE</parameter> for each",
    ),
    marks=(qwen3_coder.BEGIN, qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),
    kept_tokens=(qwen3_coder.BEGIN, qwen3_coder.END),
)
_LLAMA3_JSON = ToolFamily(
    "llama3_json",
    llama3_json.SYNTAX,
    Spelling(_envelope("parameters"), "}", separator="; "),
    marks=("<|start_header_id|>", '"parameters"'),
    kept_tokens=(llama3_json.BEGIN,),
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
        arguments=python_guide.keyword_arguments,
        write_arguments=python_guide.write_keywords,
        arguments_are="Python's keywords, such as a=1",
    ),
    marks=("[func_name1(",),
    kept_tokens=(pythonic.BEGIN, pythonic.END),
)
_LFM2 = ToolFamily(
    "lfm2",
    pythonic.SYNTAX,
    Spelling(
        lambda name: f"{name}(",
        ")",
        begin=f"{pythonic.LFM_BEGIN}[",
        separator=", ",
        end=f"]{pythonic.LFM_END}",
        trigger=pythonic.LFM_BEGIN,
        arguments=python_guide.keyword_arguments,
        write_arguments=python_guide.write_keywords,
        arguments_are="Python's keywords, such as a=1",
    ),
    marks=(pythonic.LFM_BEGIN,),
    kept_tokens=(pythonic.LFM_BEGIN, pythonic.LFM_END),
)
_MISTRAL = ToolFamily(
    "mistral",
    mistral.SYNTAX,
    Spelling(_envelope(), "}", begin=f"{mistral.BEGIN}[", separator=", ", end="]", trigger=mistral.BEGIN),
    marks=(mistral.BEGIN,),
    kept_tokens=(mistral.BEGIN, mistral.CALL_ID, mistral.ARGS),
)
_MISTRAL_ARGS = ToolFamily(
    "mistral_args",
    mistral.SYNTAX,
    Spelling(lambda name: f"{mistral.BEGIN}{name}{mistral.ARGS}", "", trigger=mistral.BEGIN),
    marks=(mistral.BEGIN, mistral.ARGS),
    kept_tokens=(mistral.BEGIN, mistral.CALL_ID, mistral.ARGS),
)
_DEEPSEEK_V31 = ToolFamily(
    "deepseek_v31",
    deepseek.SYNTAX,
    Spelling(
        lambda name: f"{deepseek.CALL_BEGIN}{name}{deepseek.SEPARATOR}",
        deepseek.CALL_END,
        begin=deepseek.CALLS_BEGIN,
        end=deepseek.CALLS_END,
        trigger=deepseek.CALLS_BEGIN,
    ),
    marks=(deepseek.CALLS_BEGIN,),
    kept_tokens=deepseek.TOKENS,
)
_GPT_OSS = ToolFamily(
    "gpt_oss",
    harmony.SYNTAX,
    Spelling(harmony.call_begin, harmony.CALL, separator=f"{harmony.START}{harmony.SPEAKER}"),
    marks=(harmony.CHANNEL, harmony.MESSAGE),
    kept_tokens=harmony.TOKENS,
    whole_answer=harmony.answer,
)


_GLM47 = ToolFamily(
    "glm47",
    glm.SYNTAX,
    Spelling(
        lambda name: f"{glm.BEGIN}{name}",
        glm.END,
        trigger=glm.BEGIN,
        arguments=lambda schema: json_schema(schema, style="glm_xml"),
        write_arguments=glm.write_arguments,
        arguments_are=f"{glm.KEY}KEY{glm.KEY_END}{glm.VALUE}VALUE{glm.VALUE_END} for each",
    ),
    marks=(glm.KEY, glm.VALUE),
    kept_tokens=(glm.BEGIN, glm.END, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
)
_KIMI_K2 = ToolFamily(
    "kimi_k2",
    kimi_k2.SYNTAX,
    Spelling(
        lambda name: f"{kimi_k2.CALL_BEGIN}{kimi_k2.PREFIX}{name}:",
        kimi_k2.CALL_END,
        begin=kimi_k2.CALLS_BEGIN,
        end=kimi_k2.CALLS_END,
        trigger=kimi_k2.CALLS_BEGIN,
        arguments=kimi_k2.numbered_arguments,
        write_arguments=kimi_k2.write_arguments,
        arguments_are=f"a number, {kimi_k2.ARGUMENTS_BEGIN} and a JSON object",
    ),
    marks=(kimi_k2.CALLS_BEGIN, kimi_k2.ARGUMENTS_BEGIN),
    kept_tokens=(
        kimi_k2.CALLS_BEGIN, kimi_k2.CALLS_END, kimi_k2.CALL_BEGIN, kimi_k2.CALL_END, kimi_k2.ARGUMENTS_BEGIN
    ),
)  # fmt: skip
# In the order in which a template is held against them: what has more marks comes before what has some of them.
FAMILIES: tuple[ToolFamily, ...] = (
    _DEEPSEEK_V31, _KIMI_K2, _GPT_OSS, _MISTRAL_ARGS, _MISTRAL, _QWEN3_CODER, _GLM47, _HERMES, _LFM2, _PYTHONIC, _LLAMA3_JSON,
)  # fmt: skip
FALLBACK = _HERMES  # for models that were never shown any format: the one that most others know


def family_for(chat_template: str) -> ToolFamily | None:
    """The family that a chat template belongs to; None if it shows no calls."""
    for family in FAMILIES:
        has_strange = any(mark in chat_template for mark in family.strange_marks)
        if not has_strange and all(mark in chat_template for mark in family.marks):
            return family
    return None


def family_named(name: str) -> ToolFamily:
    """The family of that name. Raises KeyError."""
    return {family.name: family for family in FAMILIES}[name]
