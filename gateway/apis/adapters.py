"""vLLM's routes that add and remove adapters. They write into the directory that gateways and workers watch.

Only an operator's key may use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from kvrelay.common.adapter_files import AdapterAbsentError, AdapterError
from kvrelay.gateway.adapters import AdapterRegistry
from kvrelay.gateway.apis.answer_docs import ErrorBody, errors_as
from kvrelay.gateway.apis.answering import served_models
from kvrelay.gateway.errors import ForbiddenError, InvalidRequestError, ModelNotFoundError
from kvrelay.gateway.http.request import ApiRequest, ApiRoute, RequestBody

router = APIRouter(route_class=ApiRoute, tags=["adapters"])

_ERRORS = errors_as(
    ErrorBody,
    {
        400: "The adapter cannot be served, or its name is taken",
        401: "No API key, or none that is known",
        403: "The key is not an operator's",
        404: "No such adapter",
        "4XX": "Another way in which a request can be wrong",
    },
)
# A class of responses that has a media type would document errors with it, too.
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "It is done", "content": {"text/plain": {"schema": {"type": "string"}}}},
    **_ERRORS,
}


class LoadBody(RequestBody):
    """``POST /v1/load_lora_adapter``"""

    lora_name: str
    """What requests will call the adapter, as their `model`."""
    lora_path: str
    """A directory that the gateway sees, with PEFT's two files; they are copied."""
    load_inplace: bool | None = None
    """Whether an adapter of that name is replaced."""
    base_model_name: str | None = None
    """Whose adapter it is, where several models have some."""


class UnloadBody(RequestBody):
    """``POST /v1/unload_lora_adapter``"""

    lora_name: str
    """The adapter's name."""


@router.post("/v1/load_lora_adapter", response_class=Response, responses=_ANSWERS)
async def load(body: LoadBody, request: ApiRequest) -> Response:
    """Serve an adapter from now on. Other gateways see it within two seconds; workers load it when it is asked for."""
    models = served_models(request)
    base, adapters = _base(_adapters(request), body.base_model_name)
    if models.has_own(body.lora_name):
        raise InvalidRequestError(
            f"lora_name {body.lora_name[:200]!r} is a model's name, or an alias; take another", param="lora_name"
        )
    if body.lora_name in models and (found := models.find(body.lora_name).base_name) != base:
        raise InvalidRequestError(
            f"lora_name {body.lora_name[:200]!r} is an adapter of model {found!r}; take another", param="lora_name"
        )
    try:
        await adapters.add(body.lora_name, Path(body.lora_path), replaces=bool(body.load_inplace))
    except AdapterError as error:
        raise InvalidRequestError(str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, responses=_ANSWERS)
async def unload(body: UnloadBody, request: ApiRequest) -> Response:
    """Delete an adapter's folder, so that it is served no more. Requests that run with it go on, on workers that have it."""
    for adapters in _adapters(request).values():
        try:
            await adapters.remove(body.lora_name)
        except AdapterAbsentError:  # another model may have the adapter
            continue
        except AdapterError as error:
            raise InvalidRequestError(str(error), param="lora_name") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
    raise ModelNotFoundError(f"there is no adapter {body.lora_name[:200]!r}", param="lora_name")


def _adapters(request: ApiRequest) -> Mapping[str, AdapterRegistry]:
    """The adapter registries by model, at least one. Raises ApiError if the client may not ask, or if there are no registries."""
    if not request.key_limits.operator:
        raise ForbiddenError("adapters are an operator's matter: send a key whose line in --api-keys has 'operator=1'")
    adapters = served_models(request).adapters
    if not adapters:
        raise InvalidRequestError(
            "this deployment serves no adapters: start gateways and workers with --adapters DIRECTORY"
        )
    return adapters


def _base(adapters: Mapping[str, AdapterRegistry], name: str | None) -> tuple[str, AdapterRegistry]:
    """The model that a new adapter is for, and that model's adapters. Raises InvalidRequestError."""
    if name is None and len(adapters) == 1:
        return next(iter(adapters.items()))
    if name is not None and name in adapters:
        return name, adapters[name]
    given = "is needed" if name is None else f"is {name[:200]!r}, which has no --adapters"
    raise InvalidRequestError(
        f"base_model_name {given}; models with adapters are {', '.join(map(repr, adapters))}", param="base_model_name"
    )
