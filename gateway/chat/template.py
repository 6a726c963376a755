"""Renders chat messages to a prompt with the model's Jinja template, as transformers does.

Templates come from model directories, so they run in Jinja's immutable sandbox. Some models have Python code instead of a template,
which does not run here. ``templates/`` has a template of ours for these.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvrelay.common.errors import ModelError
from kvrelay.gateway.errors import ChatTemplateError, InvalidRequestError
from kvrelay.gateway.text.tokenizer import read_json

_PROBE = "a text to look for"
_OURS = Path(__file__).parent / "templates"  # one for each model type whose checkpoints come without a template


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body, in a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body).set_lineno(line)]


class ChatTemplate:
    """A compiled template. Without a source it refuses every chat with a clear error."""

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], with_tools: ChatTemplate | None = None
    ) -> None:
        """``with_tools``: the model's own template for chats with tools, if it has one."""
        self.source = source or ""  # also shows what the model can do
        self.with_tools = with_tools
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._takes_parts = False
        if source is None:
            return
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        # Templates of some multimodal models show nothing of a content that is no list of parts.
        self._takes_parts = not self._shows(_PROBE) and self._shows(_parts(_PROBE))

    @classmethod
    def load(cls, directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read the templates of a model's directory, or ours of its type. Raises ModelError if one does not compile."""
        sources = _sources(directory)
        tool_use = sources.get("tool_use")
        with_tools = None if tool_use is None else cls(tool_use, special_tokens)
        return cls(sources.get("default"), special_tokens, with_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continues: bool = False,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, ready for the assistant's answer.

        ``continues``: the last message is the beginning of the answer and stays open. ``variables``: further names for the
        template, such as ``enable_thinking``; they cannot hide the template's own names. Raises ChatTemplateError quoting the
        template's error.
        """
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template; use /v1/completions, or add a chat_template.jinja to its directory",
                param="messages",
            )
        # A random mark finds the end of the open message: its text may also occur elsewhere.
        mark = secrets.token_hex(16)
        shown = [*messages[:-1], _marked(messages[-1], mark)] if continues else messages
        if self._takes_parts:
            shown = [{**one, "content": _parts(one.get("content"))} for one in shown]
        # Templates test ``tools is none``, which is false for an undefined name.
        names = {
            **(variables or {}),
            **self._special_tokens,
            "messages": shown,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continues,
        }
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}", param="messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _up_to(text, mark) if continues else text

    def _shows(self, content: Any) -> bool:
        """Whether a prompt has the text of a content, and not as Python writes a list."""
        try:
            prompt = self.render([{"role": "user", "content": content}])
        except ChatTemplateError:
            return False
        return _PROBE in prompt and repr(_PROBE) not in prompt


def _parts(content: Any) -> Any:
    """A text as a list of parts; anything else as it is."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _sources(directory: Path) -> dict[str, str | None]:
    """The templates in a model's directory by name. As in transformers, files come before those in ``tokenizer_config.json``.

    Multimodal models may have theirs in ``chat_template.json`` only.
    """
    paths = {
        "default": directory / "chat_template.jinja",
        "tool_use": directory / "additional_chat_templates" / "tool_use.jinja",
    }
    sources: dict[str, str | None] = {
        name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()
    }
    if "default" in sources:
        return sources
    files = (directory / name for name in ("tokenizer_config.json", "chat_template.json"))
    source = next((found for path in files if (found := read_json(path).get("chat_template"))), None)
    if source is None and (ours := _OURS / f"{read_json(directory / 'config.json').get('model_type')}.jinja").is_file():
        source = ours.read_text(encoding="utf-8")
    named = {entry["name"]: entry["template"] for entry in source} if isinstance(source, list) else {"default": source}
    return named | sources


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """``message`` with ``mark`` and a space after its content. A template that strips contents strips that space."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise _not_shown()
    return {**message, "content": f"{content}{mark} "}


def _up_to(text: str, mark: str) -> str:
    """``text`` before ``mark``, without trailing spaces if the template strips contents."""
    before, found, behind = text.rpartition(mark)
    if not found:
        raise _not_shown()
    return before if behind.startswith(" ") else before.rstrip()


def _not_shown() -> InvalidRequestError:
    return InvalidRequestError(
        "continue_final_message needs a last message with text that the chat template shows as it is",
        param="continue_final_message",
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
