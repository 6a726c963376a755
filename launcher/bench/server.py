"""Finds the model of the measured server, and makes the settings of a server that bench starts."""

from __future__ import annotations

from typing import Any

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import check
from kvrelay.launcher.bench.http_stream import ServerAddress
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.values import parse_pairs
from kvrelay.launcher.client import http_client, served_model
from kvrelay.launcher.settings import LocalSettings, local_infos

DEFAULT_URL = "http://127.0.0.1:8000"
_ANSWER_S = 10.0


def local_settings(settings: BenchSettings) -> LocalSettings:
    """The deployment that ``--self-serve`` and ``--serve`` ask for. Raises SettingsError."""
    if settings.target.url is not None:
        raise SettingsError("--url and --self-serve are both given; leave one of them out")
    known = tuple(info.name for info in local_infos())
    values: dict[str, Any] = {"port": 0, "quiet": True}
    if settings.target.model is not None:
        values["model"] = settings.target.model
    if settings.target.serve is not None:
        values |= parse_pairs(settings.target.serve, "--serve", known)
    return LocalSettings.of(**check(local_infos(), values, source="--serve"))


def model_of(url: str, model: str | None, api_key: str | None) -> str:
    """The first model that ``url`` lists, or the one named ``model``. Raises AnswerError, or SettingsError on a bad URL or key."""
    if api_key is not None and not (api_key.isprintable() and api_key.isascii()):
        raise SettingsError("--api-key: a header can only carry printable ASCII; is there a line end in it?")
    with http_client(ServerAddress(url).url, _ANSWER_S, api_key) as client:
        return served_model(client, model)
