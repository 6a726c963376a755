"""Bodies of the OpenAI routes. Types are checked strictly; ranges live here, what depends on the model does not.

Fields that nobody knows are ignored, as OpenAI-compatible servers do. Fields that we know but do not serve are refused by name as
soon as they ask for something: silence would change the meaning of a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvrelay.gateway.errors import InvalidRequestError

MAX_STOPS = 16
MAX_LOGPROBS = 20

# Lists fail at their first bad item: a complaint about each of a million would keep the loop busy for seconds.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]


class StreamOptions(BaseModel):
    """What a stream carries beside tokens."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """What both routes share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidRequestError naming the first field that asks for something we do not serve."""
        harmless: dict[str, tuple[Any, ...]] = {
            "n": (1,),
            "best_of": (1,),
            "echo": (False,),
            "suffix": ("",),
            "logit_bias": ({},),
            "tools": ([],),
            "functions": ([],),
            "tool_choice": ("none", "auto"),
            "response_format": ({"type": "text"},),
            "use_beam_search": (False,),
            "min_tokens": (0,),
            "audio": (),
            "prompt_logprobs": (),
            "stop_token_ids": ([],),
            "bad_words": ([],),
            "allowed_token_ids": (),
            "include_stop_str_in_output": (False,),
            "truncate_prompt_tokens": (),
            "structured_outputs": (),
            "guided_json": (),
            "guided_regex": (),
            "guided_choice": (),
            "guided_grammar": (),
            "chat_template": (),
            "chat_template_kwargs": ({},),
            "add_generation_prompt": (True,),
            "continue_final_message": (False,),
        }
        for name, value in (self.model_extra or {}).items():
            if name in harmless and value is not None and value not in harmless[name]:
                raise InvalidRequestError(f"{name}={str(value)[:80]!r} is not supported; leave it out", param=name)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; empty ones are dropped."""
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return tuple(stop for stop in stops if stop)


class TextPart(BaseModel):
    """A piece of a message's text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; what else it has goes to the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text in one piece."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionBody(SamplingBody):
    """``POST /v1/completions``"""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
