"""``/docs``: Swagger UI's page with its files from here, so that it needs no internet.

Its links are relative: a proxy may add a prefix.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

PAGE = "/docs"
_MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
PATHS = frozenset({PAGE, *(f"{PAGE}/{name}" for name in _MEDIA_TYPES)})


def add_docs_page(app: FastAPI) -> None:
    """Serve PATHS. Raises OSError if the package that ships the files lacks one."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvrelay",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the description is sent to swagger.io
    )
    _add_file(app, PAGE, page.body, "text/html")
    directory = resources.files("fastapi_swagger.resources")
    for name, media_type in _MEDIA_TYPES.items():
        _add_file(app, f"{PAGE}/{name}", directory.joinpath(name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes | memoryview, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type)
