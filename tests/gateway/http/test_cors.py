"""CORS: the origins whose pages may send requests and read the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.gateway.http.api_keys import line_of
from kvrelay.gateway.settings import GatewaySettings

from ..http_app import TEXT, app_for, http_only
from ..http_port import serving
from ..players import good

ORIGIN = "https://chat.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
ALLOWED = "access-control-allow-origin"


async def test_a_page_may_ask_with_its_key(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("one", "secret") + "\n")
    async with app_for(model_directory, good, api_keys=str(keys), allowed_origins=(ORIGIN,)) as app:
        preflight = await app.client.options(TEXT, headers={"origin": ORIGIN, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers[ALLOWED] == ORIGIN
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert (
            await app.client.options(TEXT, headers={"origin": "https://else.where", **PREFLIGHT})
        ).status_code == 400
        body = {"prompt": "x", "max_tokens": 2}
        refused = await app.client.post(TEXT, json=body, headers={"origin": ORIGIN})
        assert (refused.status_code, refused.headers[ALLOWED]) == (401, ORIGIN)
        for is_stream in (False, True):
            for origin in (ORIGIN, "https://else.where"):
                headers = {"origin": origin, "authorization": "Bearer secret"}
                answer = await app.client.post(TEXT, json={**body, "stream": is_stream}, headers=headers)
                assert answer.status_code == 200
                assert answer.headers.get(ALLOWED) == (ORIGIN if origin == ORIGIN else None)


async def test_without_origins_no_page_may_ask(model_directory: Path) -> None:
    async with app_for(model_directory, good) as app:
        assert (await app.client.options(TEXT, headers={"origin": ORIGIN, **PREFLIGHT})).status_code == 405
        answer = await app.client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers={"origin": ORIGIN})
        assert answer.status_code == 200
        assert ALLOWED not in answer.headers


@pytest.mark.parametrize("origin", [ORIGIN, None])
async def test_a_stream_on_a_real_connection_has_the_headers(model_directory: Path, origin: str | None) -> None:
    async with (
        app_for(model_directory, good, allowed_origins=("*",)) as app,
        serving(http_only(app.asgi)) as port,
    ):
        body = b'{"prompt": "x", "max_tokens": 5, "stream": true}'
        lines = [f"POST {TEXT} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
        if origin is not None:
            lines.append(f"origin: {origin}")
        said = await port.talk("\r\n".join([*lines, "", ""]).encode() + body)
    head, _, events = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"access-control-allow-origin: *" in head) is (origin is not None)
    assert events.endswith(b"0\r\n\r\n")
    assert events.count(b"data: ") == 3  # two messages of the worker, and [DONE]


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://chat.example.com/", "https://Chat.example.com", "null"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"--allowed-origins.*is no origin; write https://HOST") as caught:
        build(GatewaySettings, {"allowed_origins": [origin]})
    assert repr(origin) in str(caught.value)
