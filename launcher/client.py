"""Asks a deployment for greedy tokens, as ids. The small HTTP client of ``kvrelay verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.launcher.errors import VerifyError


class TokenClient:
    """One deployment's completions, between enter and exit."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        # trust_env: a proxy for the world must not be asked for what is on this machine.
        is_here = httpx.URL(self._url).host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(timeout=timeout_s, trust_env=not is_here, limits=httpx.Limits(max_connections=None))
        if api_key is not None:
            self._http.headers["authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The name of the (first) model that is served. Raises VerifyError."""
        answer = self._json("GET", "/v1/models", None)
        try:
            name: str = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise VerifyError(f"{self._url}/v1/models names no model: {answer}") from error
        return name

    def greedy(self, model: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """``max_tokens`` token ids after ``prompt``. Raises VerifyError."""
        answer = self._json(
            "POST",
            "/v1/completions",
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        try:
            token_ids: list[int] = answer["choices"][0]["token_ids"]
        except (KeyError, IndexError, TypeError) as error:
            raise VerifyError(
                f"{self._url} sends no choices[].token_ids (asked for with return_token_ids); it answered {answer}"
            ) from error
        return token_ids

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._http.request(method, self._url + path, json=body)
        except httpx.HTTPError as error:
            raise VerifyError(f"{self._url}{path} does not answer: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise VerifyError(f"{self._url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()


def counter_values(url: str, name: str, labels: Mapping[str, str]) -> list[float]:
    """The samples ``name`` with these labels (among others) that ``url``/metrics shows. Raises VerifyError."""
    try:
        answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise VerifyError(f"{url}/metrics does not answer: {error or type(error).__name__}") from error
    return [
        sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def ask_all(ask: Callable[[int], list[int]], count: int, concurrency: int) -> Iterator[tuple[int, list[int]]]:
    """``ask(index)`` for every index, ``concurrency`` at a time; (index, answer) in order. Raises what ``ask`` raises."""
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            yield from enumerate(pool.map(ask, range(count)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
