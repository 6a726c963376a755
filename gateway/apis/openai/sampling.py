"""The fields that bodies of chats and completions share: OpenAI's sampling fields, and those that vLLM and TensorRT-LLM add.

Types are checked strictly. Ranges are checked here, unless they depend on the model. Unknown fields are ignored, as other
OpenAI-compatible servers do, and named in a header of the answer. A known field that kvrelay does not serve is refused by name as
soon as it asks for something, because ignoring it would change the meaning of the request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvrelay.common.block_hash import MAX_CACHE_SALT
from kvrelay.common.retention import MAX_PRIORITY, MIN_PRIORITY, Retention
from kvrelay.common.sampling import BeamSearch
from kvrelay.common.sampling_check import MAX_ALLOWED_TOKENS
from kvrelay.gateway.apis.openai.output_format import GUIDED_FIELDS, requested_guide
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import OpenBody, RequestBody
from kvrelay.gateway.relay.request import GenerationSpec

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PROMPTS = 128
_MAX_STOP_CHARS = 1024  # each new piece of text is compared with all of a stop string
_MAX_WORDS = 256
_MAX_BAD_CHARS = 8192  # tokenized twice, with and without a space
_RAISED_PRIORITY = 80  # for a client that gives only a duration
_TIER_PRIORITY = {"priority": -10, "fast": -10, "flex": 10}  # others: 0

# A list fails at its first bad item: one error for each of a million items would block the loop for seconds.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)]
Stop = Annotated[str, Field(max_length=_MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT, pattern="^[ -~]*$")]
Name = Annotated[str, Field(min_length=1, max_length=64)]

# Fields for OpenAI's own bookkeeping. They change no answer.
BOOKKEEPING = frozenset(
    {"user", "store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

# The values of unsupported fields that ask for nothing. Any other value is refused.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prediction": (),
    "lora_request": (),
    "kv_transfer_params": (),
}

# Fields that have the same name in SamplingOptions. A missing field gets its default there.
_WISHES = {
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "ignore_eos", "cache_salt",
}  # fmt: skip


class StreamOptions(RequestBody):
    """What a stream carries beside tokens."""

    include_usage: bool | None = None
    """Whether the last chunk tells the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: whether every chunk tells its choice's usage so far."""


class OpenAIBody(OpenBody):
    """The fields that the bodies of OpenAI's and Anthropic's routes share."""

    model: str | None = None
    """A model, or an alias; left out, it is the default one."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Sharpness of sampling; 0 takes the likeliest token."""
    top_p: Probability | None = None
    """Only the likeliest tokens that have this probability together are sampled."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Equal requests with the same seed get the same answer; left out, one is drawn."""
    cache_salt: CacheSalt | None = None
    """Cached prefixes are shared only among requests with the same salt."""

    def conversation(self) -> str:
        """A key that the requests of one conversation share: `prompt_cache_key`, `user`, or how the conversation begins."""
        for name in ("prompt_cache_key", "user", "safety_identifier"):
            if isinstance(key := self._extras.get(name), str) and key:
                return f"{name} {key}"
        return self.beginning()

    @abstractmethod
    def beginning(self) -> str:
        """The part of the prompt that stays the same when the conversation goes on."""


class SamplingBody(OpenAIBody):
    """The fields that chats and completions share."""

    known_extras = frozenset(BOOKKEEPING | GUIDED_FIELDS | _HARMLESS.keys())

    stream_options: StreamOptions | None = None
    """What a stream tells beside its text."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers to return."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers to generate; the `n` best by log probability per token are returned."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """At most so many tokens are generated."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """The answer does not end before so many tokens."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Only so many of the likeliest tokens are sampled; -1 and 0 switch it off."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Only tokens of at least this share of the likeliest one's probability are sampled."""
    typical_p: Probability | None = None
    """Only tokens whose surprise is typical, up to this probability together, are sampled."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """Divides the logits of tokens that prompt or output have; 1 does nothing."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each time that the output has it."""
    stop: Stop | Stops | None = None
    """The answer ends in front of any of these texts."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_WORDS, fail_fast=True)] | None = None
    """The answer also ends at any of these tokens."""
    include_stop_str_in_output: bool | None = None
    """Whether what ended the answer is part of its text."""
    ignore_eos: bool | None = None
    """Whether to go on behind the model's own end tokens."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text, as by default."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    """Added to logits, by token id."""
    allowed_token_ids: AllowedIds | None = None
    """Only these tokens may come."""
    bad_words: Annotated[list[str], Field(max_length=_MAX_WORDS, fail_fast=True)] | None = None
    """Texts that must not come, spelled with or without a space before them."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of the prompt's tokens, and of so many likeliest others."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Only so many of the prompt's last tokens are used."""
    response_format: dict[str, Any] | None = None
    """What the answer must match: `text`, `json_object`, `json_schema` or `structural_tag`."""
    structured_outputs: dict[str, Any] | None = None
    """The same in vLLM's words: one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`."""
    use_beam_search: bool | None = None
    """Whether the likeliest whole answers are searched for."""
    beam_width: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many beams a search keeps; by default `n`."""
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] | None = None
    """Exponent of the length that a beam's log probability is divided by."""
    early_stopping: bool | Literal["never"] | None = None
    """When a beam search ends, as in transformers."""
    watermark: bool | None = None
    """Whether the text carries a watermark that `kvrelay watermark` detects."""
    logits_processors: Annotated[list[Name], Field(max_length=16, fail_fast=True)] | None = None
    """Names of processors that the operator installed."""
    service_tier: Literal["auto", "default", "fast", "flex", "priority", "scale"] | None = None
    """`priority`, also called `fast`, and `flex` move the request ten places of priority ahead and back."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Place in the line for a worker; the smaller, the earlier."""
    cache_priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    """How long the request's KV stays cached: what has more is evicted later."""
    cache_ttl: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    """For so many seconds `cache_priority` holds."""
    return_token_ids: bool | None = None
    """Whether token ids come beside the text."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens as `token_id:17`."""

    @property
    def line_priority(self) -> int:
        """The request's priority in the line of waiting requests."""
        return (self.priority or 0) + _TIER_PRIORITY.get(self.service_tier or "", 0)

    def spec(
        self, *, max_tokens: int | None, num_logprobs: int | None, max_tokens_param: str = "max_tokens"
    ) -> GenerationSpec:
        """The body as a GenerationSpec. Raises InvalidRequestError naming a field that is refused or contradicts another one."""
        refuse_unsupported(self._extras, _HARMLESS, "leave it out")
        self._check_bad_words()
        is_stream, num_choices = bool(self.stream), self.n or 1
        best_of = self.best_of if self.best_of is not None else num_choices
        beams = self._beam_search(num_choices)
        if self.stream_options is not None and not is_stream:
            raise InvalidRequestError("stream_options are given, but stream is not true", param="stream_options")
        if is_stream and best_of > num_choices:
            raise InvalidRequestError(
                f"best_of is {best_of} and n {num_choices}: which are the best is known at the end only, "
                "so this cannot be streamed",
                param="best_of",
            )
        if is_stream and beams is not None:
            raise InvalidRequestError("a beam search cannot be streamed: leave stream out", param="use_beam_search")
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        retention = None
        if self.cache_priority is not None or self.cache_ttl is not None:
            priority = _RAISED_PRIORITY if self.cache_priority is None else self.cache_priority
            retention = Retention(priority=priority, ttl_s=self.cache_ttl)
        requested = requested_guide(self.response_format, self.structured_outputs, self._extras)
        if requested is not None and beams is not None:
            name = requested.param.partition(".")[0]
            raise InvalidRequestError(f"{name} and use_beam_search are given together; leave one out", param=name)
        return GenerationSpec(
            **self.model_dump(include=_WISHES, exclude_none=True),
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else 0,
            stops=tuple(stop for stop in stops if stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            includes_stop=bool(self.include_stop_str_in_output),
            keeps_special=self.skip_special_tokens is False,
            logit_bias=_bias_entries(self.logit_bias) if self.logit_bias else (),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=tuple(word for word in self.bad_words if word) if self.bad_words else (),
            num_choices=num_choices,
            best_of=best_of,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            guide=None if requested is None else requested.guide,
            guide_param=None if requested is None else requested.param,
            has_watermark=bool(self.watermark),
            processors=tuple(self.logits_processors or ()),
            beam_search=beams,
            priority=self.line_priority,
            retention=retention,
            truncate=self.truncate_prompt_tokens,
        )

    def _beam_search(self, num_choices: int) -> BeamSearch | None:
        options = ("beam_width", "length_penalty", "early_stopping")
        if not self.use_beam_search:
            for name in options:
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} is given, but use_beam_search is not true", param=name)
            return None
        width = self.beam_width if self.beam_width is not None else max(num_choices, self.best_of or 1)
        if width < num_choices:
            raise InvalidRequestError(f"beam_width is {width}, less than n, which is {num_choices}", param="beam_width")
        if self.stop:
            raise InvalidRequestError("stop and use_beam_search are given together; leave one out", param="stop")
        return BeamSearch(
            width=width,
            num_return=num_choices,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=None if self.early_stopping == "never" else bool(self.early_stopping),
        )

    def _check_bad_words(self) -> None:
        num_chars = sum(map(len, self.bad_words or ()))
        if num_chars > _MAX_BAD_CHARS:
            raise InvalidRequestError(
                f"bad_words have {num_chars} characters in all; at most {_MAX_BAD_CHARS} are allowed", param="bad_words"
            )


def _bias_entries(logit_bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    entries: list[tuple[int, float]] = []
    for token, bias in logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequestError(
                f"logit_bias holds {token[:40]!r}; its keys must be token ids, such as '1234'", param="logit_bias"
            )
        entries.append((int(token), bias))
    return tuple(entries)


def refuse_unsupported(extra: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]], hint: str) -> None:
    """Raises InvalidRequestError naming a field of ``extra`` whose value is not among its ``harmless`` ones."""
    for name, value in extra.items():
        if name in harmless and value is not None and value not in harmless[name]:
            raise InvalidRequestError(f"{name}={str(value)[:80]!r} is not supported; {hint}", param=name)
