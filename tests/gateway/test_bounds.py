"""Every bound of every field: what lies just outside is refused, by name. The cases are made from the bodies' own models."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvrelay.gateway.openai_schema import ChatBody, CompletionBody, DetokenizeBody
from kvrelay.gateway.responses_schema import ResponseBody
from kvrelay.gateway.tgi.schema import GenerateBody, GenerateParameters

from .http_app import CHAT, TEXT, app_for
from .players import good


@dataclass(frozen=True, slots=True)
class Route:
    """A path, a body that it takes, and the model of the fields that go into it, under ``key`` if that is given."""

    path: str
    body: Mapping[str, Any]
    model: type[BaseModel]
    key: str | None = None

    def with_field(self, name: str, value: Any) -> dict[str, Any]:
        """The body with one field more."""
        return {**self.body, name: value} if self.key is None else {**self.body, self.key: {name: value}}


USER = {"role": "user", "content": "x"}
ROUTES = (
    Route(CHAT, {"messages": [USER]}, ChatBody),
    Route(TEXT, {"prompt": "x"}, CompletionBody),
    Route("/v1/responses", {"input": "x"}, ResponseBody),
    Route("/detokenize", {"tokens": [5]}, DetokenizeBody),
    Route("/generate", {"inputs": "x"}, GenerateBody),
    Route("/generate", {"inputs": "x"}, GenerateParameters, "parameters"),
)


def outside(kind: Any, bounds: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Values just outside the bounds of a type, of the bounds of what is in it, and of the type itself."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from outside(parts[0], _flat(parts[1:]))
    elif origin in (Union, types.UnionType):
        kinds = [one for one in parts if one is not type(None)]
        for one in kinds:  # what is none of one type may be one of another
            yield from (
                bad for bad in outside(one) if not any(_takes(other, bad) for other in kinds if other is not one)
            )
    elif origin is list:
        yield from ([bad] for bad in outside(parts[0]))
        yield from ([inside(parts[0])] * size for size in _sizes_outside(bounds))
    elif origin is dict:
        yield from ({"1": bad} for bad in outside(parts[1]))
        yield from ({str(key): inside(parts[1]) for key in range(size)} for size in _sizes_outside(bounds))
    elif kind is str:
        yield from ("x" * size for size in _sizes_outside(bounds))
    elif kind in (int, float):
        yield from _numbers_outside(kind, bounds)


def _takes(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _sizes_outside(bounds: tuple[Any, ...]) -> Iterator[int]:
    for bound in bounds:
        if isinstance(bound, annotated_types.MinLen):
            yield bound.min_length - 1
        elif isinstance(bound, annotated_types.MaxLen):
            yield bound.max_length + 1


def inside(kind: Any) -> Any:
    """A value that the type takes."""
    origin = get_origin(kind)
    if origin is Annotated:
        return inside(get_args(kind)[0])
    if origin is list:
        return [inside(get_args(kind)[0])]
    values: dict[Any, Any] = {str: "x", int: 1, float: 1.0}
    return {} if origin is dict else values.get(kind, {})


def _flat(metadata: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(bound for one in metadata for bound in (one.metadata if isinstance(one, FieldInfo) else [one]))


def _numbers_outside(kind: Any, bounds: tuple[Any, ...]) -> Iterator[Any]:
    def next_to(value: Any, direction: float) -> Any:
        return value + int(direction) if kind is int else math.nextafter(float(value), direction * math.inf)

    yield "1"
    yield [1]
    if kind is int:
        yield 1.5
    else:
        yield from (math.nan, math.inf, -math.inf)
    for bound in bounds:
        match bound:
            case annotated_types.Ge(ge=limit):
                yield next_to(limit, -1.0)
            case annotated_types.Le(le=limit):
                yield next_to(limit, 1.0)
            case annotated_types.Gt(gt=limit):
                yield limit
            case annotated_types.Lt(lt=limit):
                yield limit


def _cases(route: Route) -> Iterator[tuple[str, Any]]:
    for name, field in route.model.model_fields.items():
        yield from ((name, bad) for bad in outside(field.annotation, tuple(field.metadata)))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path + (f" {route.key}" if route.key else ""))
async def test_what_is_just_outside_is_refused_by_name(model_directory: Path, route: Route) -> None:
    cases = list(_cases(route))
    async with app_for(model_directory, good) as app:
        for name, value in cases:
            content = json.dumps(route.with_field(name, value))  # with NaN and Infinity, as Python's clients send them
            response = await app.client.post(route.path, content=content, headers={"content-type": "application/json"})
            shown = f"{name}={str(value)[:80]}: {response.text[:300]}"
            is_tgi = route.path == "/generate"
            assert response.status_code == (422 if is_tgi else 400), shown
            answer = response.json()
            assert name in (answer["error"] if is_tgi else answer["error"]["message"]), shown
            assert is_tgi or answer["error"]["param"] == name, shown
        assert app.player.submits == []


def test_every_number_has_a_bound_that_is_tried() -> None:
    """A new field comes with its cases."""
    for route in ROUTES:
        for name, field in route.model.model_fields.items():
            if _has_number(field.annotation):
                tried = [value for case, value in _cases(route) if case == name]
                assert any(_is_number(value) for value in tried), f"{route.path}: {name} has no bound"


def _has_number(kind: Any) -> bool:
    return kind in (int, float) or (
        get_origin(kind) is not Literal and any(_has_number(one) for one in get_args(kind) if one is not kind)
    )


def _is_number(value: Any) -> bool:
    """Whether it is a number of the right type, maybe in lists or objects."""
    while isinstance(value, list | dict) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return isinstance(value, int | float) and math.isfinite(value) and value != 1.5
