"""Bodies of TGI's routes, and what they ask for in our own vocabulary.

Fields that nobody knows are ignored, as TGI does. Ranges are TGI's; where TGI has none, or lets its operator choose, they are those
of the OpenAI routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.openai.output_format import make_guide
from kvrelay.gateway.apis.openai.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import RequestBody
from kvrelay.gateway.relay.request import GenerationSpec

_DEFAULT_NEW_TOKENS = 100
_WISHES = {
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "seed",
    "truncate",
}  # as others call them
_NAMED_SCHEMA = {"name", "description", "schema", "strict"}  # of what "json_schema" takes beside a schema itself

Mass = Annotated[float, Field(gt=0, lt=1)]


class Grammar(RequestBody):
    """What the output must match."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    """What the value is."""
    value: Any
    """A JSON Schema, or a regular expression."""

    def guide(self) -> Guide:
        """Raises InvalidRequestError if the value is none of its type."""
        if self.type == "regex":
            return make_guide(GuideKind.REGEX, self.value, "grammar.value")
        schema = self.value
        if isinstance(schema, dict) and "schema" in schema and schema.keys() <= _NAMED_SCHEMA:
            schema = schema["schema"]
        return make_guide(GuideKind.JSON_SCHEMA, schema, "grammar.value")


class GenerateParameters(RequestBody):
    """TGI's parameters. Without any of those that sample, the likeliest token is taken."""

    adapter_id: str | None = None
    """Refused: no adapters are served."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many texts to generate; the likeliest is returned."""
    temperature: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    """Sharpness of sampling."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """Divides the logits of tokens that prompt or output have; 1 does nothing."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    """Subtracted from a token's logit for each time that the output has it."""
    top_k: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    """Only so many of the likeliest tokens are sampled."""
    top_p: Mass | None = None
    """Only the likeliest tokens that have this probability together are sampled."""
    typical_p: Mass | None = None
    """Only tokens whose surprise is typical, up to this probability together, are sampled."""
    do_sample: bool | None = None
    """Whether tokens are sampled; else the likeliest is taken."""
    max_new_tokens: Annotated[int, Field(gt=0)] | None = _DEFAULT_NEW_TOKENS
    """At most so many tokens are generated; null: as many as fit."""
    return_full_text: bool | None = None
    """Whether the text begins with the prompt."""
    stop: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    """The text ends with the first of these."""
    truncate: Annotated[int, Field(gt=0)] | None = None
    """Only so many of the prompt's last tokens are used."""
    watermark: bool | None = None
    """Whether the text carries a watermark that `kvrelay watermark` detects."""
    details: bool | None = None
    """Whether tokens, seed and reason of the end come with the text."""
    decoder_input_details: bool | None = None
    """Whether the prompt's tokens come with the details."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Equal requests with the same seed get the same text; left out, one is drawn."""
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of so many likeliest tokens."""
    grammar: Grammar | None = None
    """What the text must match."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: asked for, or given a parameter that means nothing to the likeliest token.

        As TGI's ``NextTokenChooser`` decides it; a temperature of 1 alone is its default, and asks for nothing.
        """
        has_filter = self.top_k is not None or self.top_p is not None or self.typical_p is not None
        return bool(self.do_sample) or has_filter or self.temperature not in (None, 1.0)

    def spec(self, *, is_stream: bool) -> GenerationSpec:
        """The parameters in our own vocabulary. Raises InvalidRequestError naming the field that is refused, or contradicted."""
        self._check_together(is_stream=is_stream)
        temperature = 1.0 if self.temperature is None else self.temperature
        best_of = self.best_of or 1
        return GenerationSpec(
            **self.model_dump(include=_WISHES, exclude_none=True),
            max_tokens=self.max_new_tokens,
            temperature=temperature if self.samples else 0.0,
            stops=tuple(stop for stop in self.stop or () if stop),
            includes_stop=True,
            num_choices=best_of,  # all of them are told, with details
            best_of=best_of,
            num_logprobs=self.top_n_tokens or 0,
            num_prompt_logprobs=0 if self.decoder_input_details else None,
            guide=None if self.grammar is None else self.grammar.guide(),
            guide_param=None if self.grammar is None else "parameters.grammar",
            has_watermark=bool(self.watermark),
            max_tokens_param="max_new_tokens",
        )

    def _check_together(self, *, is_stream: bool) -> None:
        if self.adapter_id:
            raise InvalidRequestError(
                f"adapter_id={self.adapter_id[:80]!r} is not supported: no adapters are served here; leave it out",
                param="adapter_id",
            )
        if self.decoder_input_details and is_stream:
            raise InvalidRequestError(
                "decoder_input_details=true is not supported when streaming tokens", param="decoder_input_details"
            )
        if self.best_of is None or self.best_of == 1:
            return
        if is_stream:
            raise InvalidRequestError(
                f"best_of is {self.best_of}: which is the best is known at the end only, so this cannot be streamed",
                param="best_of",
            )
        if self.seed is not None:
            raise InvalidRequestError("seed must not be set when best_of > 1", param="seed")
        if not self.samples and self.temperature is None:
            raise InvalidRequestError(
                f"best_of is {self.best_of}, and without sampling all would be the same: set do_sample, temperature, "
                "top_k, top_p or typical_p",
                param="best_of",
            )


class GenerateBody(RequestBody):
    """``POST /generate`` and ``POST /generate_stream``"""

    inputs: Annotated[str, Field(min_length=1)]
    """The text to continue."""
    # TGI samples for a body without any parameters, and takes the likeliest token for one with empty parameters.
    parameters: GenerateParameters | None = None
    """How to continue it. Without any the text is sampled."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens, as by default."""

    @property
    def wanted(self) -> GenerateParameters:
        """The parameters, TGI's defaults if there are none."""
        return GenerateParameters(do_sample=True) if self.parameters is None else self.parameters


class CompatBody(GenerateBody):
    """``POST /``, which streams if asked to."""

    stream: bool | None = None
    """Whether the text comes as server-sent events."""
