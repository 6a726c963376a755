"""What is asked of the routes for tokens, and what they answer, for ``/openapi.json``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from kvrelay.gateway.apis.openai.bodies import Messages
from kvrelay.gateway.apis.openai.messages import checked_messages
from kvrelay.gateway.apis.openai.sampling import TokenId
from kvrelay.gateway.chat.chat import read_chat
from kvrelay.gateway.http.request import RequestBody
from kvrelay.gateway.model import Model


class TokenizeBody(RequestBody):
    """``POST /tokenize``: TGI's with ``inputs``, vLLM's with ``prompt`` or ``messages``."""

    inputs: str | None = None
    """A text to tokenize, as TGI asks for it."""
    model: str | None = None
    """The served model; left out, it is that one."""
    prompt: str | None = None
    """A text to tokenize."""
    messages: Messages | None = None
    """A chat to tokenize."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    """Functions that the chat's template shows."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens: by default to texts, not to chats."""
    add_generation_prompt: bool | None = None
    """Whether the chat template opens the answer, as by default."""
    continue_final_message: bool | None = None
    """Whether the last message is left open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More names for the chat template."""
    return_token_strs: bool | None = None
    """Whether to tell how the vocabulary writes each token."""

    def chat(self, model: Model) -> str:
        """The ``messages`` as the model's prompt. Raises InvalidRequestError naming the field that is wrong."""
        return read_chat(
            model.template,
            model.dialect,
            checked_messages(self.messages or ()),
            tools=self.tools,
            continues=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=self.chat_template_kwargs,
        ).prompt


class DetokenizeBody(RequestBody):
    """``POST /detokenize``, as vLLM's."""

    model: str | None = None
    """The served model; left out, it is that one."""
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]
    """Token ids to turn into text."""


class SpanToken(BaseModel):
    """A token of a text, and where it stands there, in characters."""

    id: int = Field(ge=0, description="Its id.")
    text: str = Field(description="Its text.")
    start: int = Field(ge=0, description="Where it begins, in characters.")
    stop: int = Field(ge=0, description="Where it ends.")


class ChatTokens(BaseModel):
    """Of ``/chat_tokenize``."""

    tokenize_response: list[SpanToken] = Field(description="The tokens.")
    templated_text: str = Field(description="The chat as its template writes it.")


class PromptTokens(BaseModel):
    """Of ``/tokenize``, in vLLM's form."""

    count: int = Field(ge=0, description="How many tokens there are.")
    max_model_len: int | None = Field(description="So many tokens prompt and answer may have.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(description="How the vocabulary writes them, if asked for.")


class Detokenized(BaseModel):
    """Of ``/detokenize``, as vLLM's."""

    prompt: str = Field(description="The text, special tokens included.")
