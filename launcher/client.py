"""Asks a server for its models, for greedy tokens as ids, and for its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.errors import AnswerError, refused


def http_client(url: str, timeout_s: float, api_key: str | None = None) -> httpx.Client:
    """A client for the deployment at ``url``; the caller closes it. Raises SettingsError on a URL that is none."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL as error:
        raise SettingsError(f"--url is {url!r}: {error}") from error
    is_here = host in ("127.0.0.1", "localhost", "::1")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    # trust_env: do not ask a proxy for addresses on this machine.
    return httpx.Client(base_url=url, timeout=timeout_s, trust_env=not is_here, limits=limits, headers=headers)


def served_models(client: httpx.Client) -> list[str]:
    """The names that the server lists, of models, their adapters and aliases. Raises AnswerError."""
    answer = _json(client, "GET", "v1/models", None)
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise AnswerError(f"{client.base_url} names no models at v1/models: {answer}") from error


def served_model(client: httpx.Client, model: str | None = None) -> str:
    """The first model that the server lists, or ``model`` if it is listed. Raises AnswerError."""
    names = served_models(client)
    if not names or (model is not None and model not in names):
        asked = "a model" if model is None else repr(model)
        raise AnswerError(f"{client.base_url} does not serve {asked}; it serves {', '.join(names) or 'none'}")
    return model or names[0]


def greedy(client: httpx.Client, model: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """``max_tokens`` greedy token ids after ``prompt``. Raises AnswerError."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = _json(client, "POST", "v1/completions", body)
    try:
        return tuple(answer["choices"][0]["token_ids"])
    except (KeyError, IndexError, TypeError) as error:
        raise AnswerError(
            f"{client.base_url} sends no choices[].token_ids (asked for with return_token_ids); it answered {answer}"
        ) from error


def counter_values(url: str, name: str, labels: Mapping[str, str]) -> list[float]:
    """The values of the samples ``name`` at ``url``/metrics whose labels include ``labels``. Raises AnswerError."""
    try:
        answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise AnswerError(f"{url}/metrics does not answer: {error or type(error).__name__}") from error
    return [
        sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def _json(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
    try:
        answer = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise AnswerError(
            f"{client.base_url} does not answer ({error or type(error).__name__}); start a server there (`kvrelay local`), "
            "or name another one with --url"
        ) from error
    if answer.status_code != 200:
        raise refused(str(answer.url), answer.status_code, answer.content)
    try:
        return answer.json()
    except ValueError as error:
        raise AnswerError(f"{answer.url} answered no JSON; is --url right?") from error
