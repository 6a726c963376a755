"""A request to the executor: a prompt, how to continue it, and its body as the gateway reads it."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.executor.pictures import with_files
from kvrelay.executor.sampling import SamplingParams
from kvrelay.gateway.errors import InvalidRequestError

Message = Mapping[str, Any]  # {"role": …, "content": …}

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a prompt, rendered with the model's chat template. The answer is the raw text of the model.

    Messages may have images: parts as in OpenAI's chats, or ``{"type": "image_pil", "image_pil": image}`` with one of Pillow.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None  # shown by the template, in OpenAI's form
    add_generation_prompt: bool = True  # begin the assistant's turn
    continue_final_message: bool = False  # continue the last message instead of a new turn
    chat_template_kwargs: Mapping[str, Any] | None = None  # further names for the template

    def body(self) -> dict[str, Any]:
        """The fields of a chat's body that differ from their defaults."""
        body: dict[str, Any] = {"messages": _plain(self.messages)}
        if self.tools is not None:
            body["tools"] = _plain(self.tools)
        if self.continue_final_message or not self.add_generation_prompt:
            body |= {"add_generation_prompt": False, "continue_final_message": self.continue_final_message}
        if self.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = _plain(self.chat_template_kwargs)
        return body


def _plain(value: Any) -> Any:
    """Mappings and sequences of them as JSON has them; anything else as it is, which the body's check refuses by name."""
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


Prompt = str | Sequence[int] | Chat
"""A text, its token ids, or a chat."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Raises InvalidRequestError on an invalid id or time, or on parameters of a wrong type."""

    prompt: str | Sequence[int] | Chat
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None  # for logs and outputs; None: one is made
    timeout_s: float | None = None  # timeout of the whole request; None: the gateway settings' limit
    priority: int = 0  # in the waiting line; smaller is earlier
    cache_priority: int | None = (
        None  # 0 to 100, the higher the longer its KV stays cached; None: as others, above with a ttl
    )
    cache_ttl: float | None = None  # seconds for which cache_priority holds

    def __post_init__(self) -> None:
        _check_params(self.sampling_params)
        if self.request_id is not None and _ID.fullmatch(str(self.request_id)) is None:
            raise InvalidRequestError(
                f"request_id is {str(self.request_id)[:140]!r}; it must be 1 to 128 letters, digits, '.', '_', ':' or '-'",
                param="request_id",
            )
        is_time = self.timeout_s is None or (
            isinstance(self.timeout_s, int | float) and 0 < self.timeout_s < _LONGEST_S
        )
        if not is_time:
            raise InvalidRequestError(
                f"timeout_s is {self.timeout_s!r}; it must be a number above 0 and below {_LONGEST_S:,}",
                param="timeout_s",
            )

    def body(self, prompt: str | Sequence[int], *, stream: bool) -> dict[str, Any]:
        """The body of a completion of ``prompt`` (this request's, or the tokens of its chat). Raises InvalidRequestError."""
        body = {**self.sampling_params.body(), "prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if stream:
            body["stream"] = True
        hints = {"priority": self.priority or None, "cache_priority": self.cache_priority, "cache_ttl": self.cache_ttl}
        body |= {name: value for name, value in hints.items() if value is not None}
        return body


def as_request(prompt: Prompt | Request, sampling_params: SamplingParams | None) -> Request:
    """``prompt`` as a request, its pictures as files.

    Raises InvalidRequestError on a wrong type, or if parameters are given twice.
    """
    if isinstance(prompt, Request):
        if sampling_params is not None:
            raise InvalidRequestError(
                "sampling_params are given beside a Request, which has its own; leave them out", param="sampling_params"
            )
        return dataclasses.replace(prompt, prompt=_checked(prompt.prompt))
    return Request(_checked(prompt), SamplingParams() if sampling_params is None else sampling_params)


def _checked(prompt: Prompt) -> str | list[int] | Chat:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes):  # whose numbers are no token ids
        raise wrong_prompt(prompt)
    if isinstance(prompt, Chat):
        messages: Any = prompt.messages
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f"messages is {str(messages)[:80]!r}; it must be a list of messages, such as "
                '{"role": "user", "content": …}',
                param="messages",
            )
        return dataclasses.replace(prompt, messages=with_files(messages))
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError as error:
        raise wrong_prompt(prompt) from error


def wrong_prompt(prompt: object) -> InvalidRequestError:
    """The error of something that is no prompt."""
    return InvalidRequestError(
        f"the prompt is {str(prompt)[:80]!r}; give one text, one list of token ids, a Chat or a Request", param="prompt"
    )


def _check_params(sampling_params: object) -> None:
    """Raises InvalidRequestError if they are not SamplingParams."""
    if not isinstance(sampling_params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params is {str(sampling_params)[:80]!r}; give SamplingParams(…)", param="sampling_params"
        )


def encode_body(body: Mapping[str, Any]) -> bytes:
    """``body`` as JSON. Raises InvalidRequestError on values that JSON cannot represent."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from error
