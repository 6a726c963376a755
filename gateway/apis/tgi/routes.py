"""TGI's routes: bodies to jobs, and what the endpoint says of itself.

Where TGI answers a stream's error with status 200 and an event, the status says it here, as long as nothing was sent; its clients
read both.
"""

from __future__ import annotations

from enum import Enum

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from kvrelay.gateway.apis.answer_docs import REQUEST_HEADERS
from kvrelay.gateway.apis.answering import Job, Responder, sequences_of
from kvrelay.gateway.apis.tgi.answer import GenerateFormat, Wanted
from kvrelay.gateway.apis.tgi.answer_docs import HEALTHY, GenerateAnswer, Info, StreamEvent, tgi_answers
from kvrelay.gateway.apis.tgi.bodies import CompatBody, GenerateBody
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.model import Models
from kvrelay.gateway.text.tokenizer import aside


class TgiRoutes:
    """Answers TGI's clients."""

    def __init__(self, models: Models, responder: Responder) -> None:
        self._models = models
        self._responder = responder

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        tags: list[str | Enum] = ["Text Generation Inference"]
        for path, endpoint, answers in (
            ("/generate", self.generate, tgi_answers(GenerateAnswer)),
            ("/generate_stream", self.generate_stream, tgi_answers(events=StreamEvent)),
            ("/", self.compat_generate, tgi_answers(list[GenerateAnswer], events=StreamEvent)),
        ):
            app.post(path, tags=tags, responses=answers, openapi_extra=REQUEST_HEADERS)(endpoint)
        app.get("/info", tags=tags, responses=tgi_answers(Info))(self.info)
        for path in ("/health", "/ping"):
            app.get(path, tags=tags, response_class=Response, responses=HEALTHY)(self.health)

    async def generate(self, body: GenerateBody, request: ApiRequest) -> Response:
        """Continue a text."""
        return await self._respond(body, request, is_stream=False)

    async def generate_stream(self, body: GenerateBody, request: ApiRequest) -> Response:
        """Continue a text, an event for each token."""
        return await self._respond(body, request, is_stream=True)

    async def compat_generate(self, body: CompatBody, request: ApiRequest) -> Response:
        """Continue a text, with ``stream`` in events. The answer begins with the prompt unless ``return_full_text`` is false."""
        return await self._respond(body, request, is_stream=bool(body.stream), is_compat=True)

    async def info(self) -> Response:
        """What is served, and within which limits."""
        model = self._models.find(None)
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

    async def health(self) -> Response:
        """Nothing, if there are workers that could generate; else 503 with the reason."""
        self._models.find(None).limits()
        return Response()

    async def _respond(
        self, body: GenerateBody, request: ApiRequest, *, is_stream: bool, is_compat: bool = False
    ) -> Response:
        model = self._models.find(None)
        model.check()
        parameters = body.wanted
        spec = parameters.spec(is_stream=is_stream)
        adds_special_tokens = body.add_special_tokens is not False
        prompt = await aside(
            lambda: model.encode(body.inputs, "inputs", add_special_tokens=adds_special_tokens),
            len(await request.body()),
        )
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
        return await self._responder.respond(request, Job(model, sequences, written, is_stream=is_stream))
