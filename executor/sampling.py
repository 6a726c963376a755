"""Sampling parameters, with the names of vLLM's and TensorRT-LLM's ``SamplingParams``.

They become the body of OpenAI's completions, which the gateway's own schema reads (:mod:`kvrelay.gateway.apis.openai.bodies`). So
defaults, ranges and contradictions are those of HTTP, and so are the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvrelay.gateway.errors import InvalidRequestError

_MAX_OUTPUTS = 1024  # above a gateway's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must match; set one field. The names are vLLM's."""

    json: str | Mapping[str, Any] | None = None  # a JSON Schema
    regex: str | None = None
    choice: Sequence[str] | None = None  # the output must be one of these
    grammar: str | None = None  # EBNF, as llama.cpp writes it (GBNF)
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # xgrammar's

    def body(self) -> dict[str, Any]:
        """The fields that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. They are checked when they are used: InvalidRequestError names the wrong field."""

    n: int = 1  # number of outputs to return
    best_of: int | None = None  # number of outputs to generate; the likeliest are returned
    temperature: float = 1.0  # 0: the likeliest token each time
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a new one each time
    max_tokens: int | None = 16  # of output; None: as many as fit
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None  # texts before which the output ends
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None  # for each output token, and so many of the likeliest ones
    prompt_logprobs: int | None = None  # like logprobs, for the prompt's tokens except the first
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool = False
    beam_width: int | None = None  # None: n
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    watermark: bool = False
    logits_processors: Sequence[str] = ()  # names that the operator registered
    skip_special_tokens: bool = True  # in the text
    add_special_tokens: bool = True  # in front of a prompt that is a text
    truncate_prompt_tokens: int | None = None  # use only this many of the prompt's last tokens

    @property
    def num_outputs(self) -> int:
        """``n``; 1 if ``n`` is invalid, because the request is then refused with all its errors."""
        return self.n if type(self.n) is int and 0 < self.n <= _MAX_OUTPUTS else 1

    def body(self) -> dict[str, Any]:
        """The fields of a completion's body that differ from their defaults.

        Raises InvalidRequestError on a number that JSON cannot represent, because no range check would refuse it later.
        """
        body: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequestError(f"{field.name} is {value}; it must be a finite number", param=field.name)
            if value == field.default and type(value) is type(field.default) and field.name != "max_tokens":
                continue
            body[field.name] = value.body() if isinstance(value, StructuredOutputsParams) else _plain(value)
        if isinstance(self.logit_bias, Mapping):
            body["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return body


def _plain(value: Any) -> Any:
    """Converts other sequences to lists, as JSON has them."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
