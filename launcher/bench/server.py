"""The server that is measured: what it says of itself, or how it is started here."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import check
from kvrelay.launcher.bench.http_stream import ServerAddress
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.values import parse_pairs
from kvrelay.launcher.errors import BenchError
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


def served_model(url: str, model: str | None, api_key: str | None) -> str:
    """The first model that ``url`` lists, or the one named ``model``. Raises BenchError if nobody answers, or has no such model.

    Raises SettingsError on a key that cannot be sent.
    """
    address = ServerAddress(url)
    if api_key is not None and not (api_key.isprintable() and api_key.isascii()):
        raise SettingsError("--api-key: a header can only carry printable ASCII; is there a line end in it?")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{address.url}/v1/models", headers=headers)  # noqa: S310 - http(s), checked above
    # The requests go past proxies too: a proxy is not what is measured.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            names = [str(entry["id"]) for entry in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        raise BenchError(f"{address.url}/v1/models answers {error.code} {error.reason}; is --url right?") from error
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise BenchError(
            f"{address.url} does not answer ({reason}); start a server there (`kvrelay local`), name another one with --url, "
            "or let bench start one with --self-serve"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{address.url}/v1/models is no list of models; is --url right?") from error
    if not names or (model is not None and model not in names):
        asked = "a model" if model is None else repr(model)
        raise BenchError(f"{address.url} does not serve {asked}; --model must be one of {', '.join(names) or 'none'}")
    return model or names[0]
