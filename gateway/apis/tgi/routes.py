"""TGI's routes: they turn bodies into requests, and describe the endpoint.

Unknown fields are ignored, as in TGI. Ranges are TGI's. Where TGI has no range, or lets its operator choose one, the OpenAI routes'
ranges hold. TGI answers an error of a stream with status 200 and an error event. Here the status tells the error as long as nothing
was sent; TGI's clients understand both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.answer_docs import REQUEST_HEADERS
from kvrelay.gateway.apis.answering import model_for, respond, sequences_of, served_models
from kvrelay.gateway.apis.openai.bodies import BEGINNING_LEN
from kvrelay.gateway.apis.openai.output_format import make_guide
from kvrelay.gateway.apis.openai.sampling import MAX_CHOICES, MAX_LOGPROBS, Stops
from kvrelay.gateway.apis.tgi.answer import GenerateFormat, Wanted
from kvrelay.gateway.apis.tgi.answer_docs import HEALTHY, GenerateAnswer, Info, StreamEvent, tgi_answers
from kvrelay.gateway.errors import InvalidRequestError, ModelNotFoundError
from kvrelay.gateway.http.request import ApiRequest, ApiRoute, RequestBody
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.text.tokenizer import aside

router = APIRouter(route_class=ApiRoute, tags=["Text Generation Inference"])

_DEFAULT_NEW_TOKENS = 100
# Fields that have the same name in SamplingOptions.
_WISHES = {"top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed", "truncate"}
# The keys of a named schema, which "json_schema" takes beside a plain schema.
_NAMED_SCHEMA = {"name", "description", "schema", "strict"}

Mass = Annotated[float, Field(gt=0, lt=1)]


class Grammar(RequestBody):
    """What the output must match."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    """What the value is."""
    value: Any
    """A JSON Schema, or a regular expression."""

    def guide(self) -> Guide:
        """The guide. Raises InvalidRequestError if the value does not fit its type."""
        if self.type == "regex":
            return make_guide(GuideKind.REGEX, self.value, "grammar.value")
        schema = self.value
        if isinstance(schema, dict) and "schema" in schema and schema.keys() <= _NAMED_SCHEMA:
            schema = schema["schema"]
        return make_guide(GuideKind.JSON_SCHEMA, schema, "grammar.value")


class GenerateParameters(RequestBody):
    """TGI's parameters. Without any sampling parameter, the likeliest token is taken."""

    adapter_id: str | None = None
    """The adapter that computes the text; without, the model as it is."""
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
    stop: Stops | None = None
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
        """Whether tokens are drawn: ``do_sample`` is set, or a parameter that only matters when tokens are drawn.

        The rule is that of TGI's ``NextTokenChooser``. A temperature of 1 is its default, so it does not count.
        """
        has_filter = self.top_k is not None or self.top_p is not None or self.typical_p is not None
        return bool(self.do_sample) or has_filter or self.temperature not in (None, 1.0)

    def spec(self, *, is_stream: bool) -> GenerationSpec:
        """The parameters as a GenerationSpec.

        Raises InvalidRequestError naming a field that is refused or contradicts another one.
        """
        self._check_together(is_stream=is_stream)
        temperature = 1.0 if self.temperature is None else self.temperature
        best_of = self.best_of or 1
        return GenerationSpec(
            **self.model_dump(include=_WISHES, exclude_none=True),
            max_tokens=self.max_new_tokens,
            temperature=temperature if self.samples else 0.0,
            stops=tuple(stop for stop in self.stop or () if stop),
            includes_stop=True,
            num_choices=best_of,  # with details, the answer shows all of them
            best_of=best_of,
            num_logprobs=self.top_n_tokens or 0,
            num_prompt_logprobs=0 if self.decoder_input_details else None,
            guide=None if self.grammar is None else self.grammar.guide(),
            guide_param=None if self.grammar is None else "parameters.grammar",
            has_watermark=bool(self.watermark),
            max_tokens_param="max_new_tokens",
        )

    def _check_together(self, *, is_stream: bool) -> None:
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
    model: str | None = None
    """A model, or an alias, where several are served; TGI has no such field. Left out, it is the default one."""
    # TGI samples for a body without any parameters, and takes the likeliest token for one with empty parameters.
    parameters: GenerateParameters | None = None
    """How to continue it. Without any the text is sampled."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens, as by default."""

    @property
    def wanted(self) -> GenerateParameters:
        """The parameters; TGI's defaults if the body has none."""
        return GenerateParameters(do_sample=True) if self.parameters is None else self.parameters


class CompatBody(GenerateBody):
    """``POST /``. It streams if the body asks for it."""

    stream: bool | None = None
    """Whether the text comes as server-sent events."""


@router.post("/generate", responses=tgi_answers(GenerateAnswer), openapi_extra=REQUEST_HEADERS)
async def generate(body: GenerateBody, request: ApiRequest) -> Response:
    """Continue a text."""
    return await _respond(body, request, is_stream=False)


@router.post("/generate_stream", responses=tgi_answers(events=StreamEvent), openapi_extra=REQUEST_HEADERS)
async def generate_stream(body: GenerateBody, request: ApiRequest) -> Response:
    """Continue a text, an event for each token."""
    return await _respond(body, request, is_stream=True)


@router.post("/", responses=tgi_answers(list[GenerateAnswer], events=StreamEvent), openapi_extra=REQUEST_HEADERS)
async def compat_generate(body: CompatBody, request: ApiRequest) -> Response:
    """Continue a text, with ``stream`` in events. The answer begins with the prompt unless ``return_full_text`` is false."""
    return await _respond(body, request, is_stream=bool(body.stream), is_compat=True)


@router.get("/info", responses=tgi_answers(Info))
async def info(request: Request) -> Response:
    """What is served, and its limits. Of several models: the default one, or `?model=NAME`."""
    model = served_models(request).find(request.query_params.get("model"))
    limit, card = model.limits().max_model_len, model.pool.cards[0]
    info = Info(
        model_id=model.name,
        model_sha=card.layout.weights_digest,
        model_dtype=f"torch.{card.layout.geometry.groups[0].dtype}",
        model_device_type=card.device_type,
        max_concurrent_requests=model.relay.settings.max_queued,
        max_input_tokens=limit - 1,
        max_input_length=limit - 1,
        max_total_tokens=limit,
    )
    return JSONResponse(info.model_dump())


@router.get("/health", response_class=Response, responses=HEALTHY)
@router.get("/ping", response_class=Response, responses=HEALTHY)
async def health(request: Request) -> Response:
    """Answers 200 without a body if some workers can generate; else 503 with the reason."""
    models = list(served_models(request))
    for model in models:
        if model.is_up:
            return Response()
    models[0].limits()
    return Response()


async def _respond(body: GenerateBody, request: ApiRequest, *, is_stream: bool, is_compat: bool = False) -> Response:
    parameters = body.wanted
    try:
        model = model_for(request, parameters.adapter_id or body.model, lambda: body.inputs[:BEGINNING_LEN])
    except ModelNotFoundError as error:
        if not parameters.adapter_id:
            raise
        text = f"adapter_id={(parameters.adapter_id or '')[:80]!r} is not served here: {error}"
        raise InvalidRequestError(text, param="adapter_id") from error
    model.check(request.flow())
    spec = parameters.spec(is_stream=is_stream)

    def encode() -> list[int]:
        return model.encode(body.inputs, "inputs", add_special_tokens=body.add_special_tokens is not False)

    prompt = await aside(encode, request.num_body_bytes)
    sequences = sequences_of(model, request, [prompt], spec, "inputs")
    is_full = is_compat if parameters.return_full_text is None else parameters.return_full_text
    wanted = Wanted(
        details=bool(parameters.details or parameters.decoder_input_details),
        prefill=bool(parameters.decoder_input_details),
        top_tokens=bool(parameters.top_n_tokens),
        prefix=body.inputs if is_full else "",
        is_list=is_compat,
    )
    written = GenerateFormat(model.tokenizer, sequences[0], wanted)
    return await respond(request, model, sequences, written, is_stream=is_stream)
