"""What ``/openapi.json`` tells of every body."""

from __future__ import annotations

from pathlib import Path

from .http_app import app_for
from .players import good


async def test_every_field_and_parameter_is_described(model_directory: Path) -> None:
    async with app_for(model_directory, good) as app:
        document = (await app.client.get("/openapi.json")).json()
    fields = {
        f"{name}.{field}": told
        for name, schema in document["components"]["schemas"].items()
        for field, told in schema.get("properties", {}).items()
    }
    parameters = {
        f"{path} {parameter['name']}": parameter
        for path, methods in document["paths"].items()
        for route in methods.values()
        for parameter in route.get("parameters", [])
    }
    assert len(fields) > 200
    assert parameters
    assert [name for name, told in (fields | parameters).items() if not told.get("description")] == []
