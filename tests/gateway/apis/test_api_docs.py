"""The description of all bodies in ``/openapi.json``."""

from __future__ import annotations

import re
from pathlib import Path

from kvrelay.gateway.http.api_keys import line_of

from ..http_app import app_for
from ..players import good


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


async def test_the_page_needs_nothing_from_elsewhere(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("one", "secret") + "\n")
    async with app_for(model_directory, good, api_keys=str(keys)) as app:
        page = await app.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "//" not in re.sub(r"<!--.*?-->", "", page.text)
        names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {Path(name).suffix for name in names} == {".js", ".css", ".png"}
        assert "url: 'openapi.json'" in page.text
        for name in names:
            file = await app.client.get(page.url.join(name))
            assert file.status_code == 200
            assert file.content
            for place in re.findall(rb"url\(([^)]*)\)", file.content) if name.endswith(".css") else ():
                assert place.strip(b"\"'").startswith(b"data:")


async def test_the_bare_address_leads_to_the_page(model_directory: Path) -> None:
    async with app_for(model_directory, good) as app:
        answer = await app.client.get("/")
        assert (answer.status_code, answer.headers["location"]) == (307, "docs")
