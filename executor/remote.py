"""A cluster at an address: the executor speaks HTTP to its gateway, as any client of OpenAI's API does.

Needs neither torch nor a tokenizer. Texts go as they are; where the number of a prompt's tokens must be known, or a chat's template
be rendered, the gateway is asked for the tokens first (``/tokenize``), and generates from them.

A connection that breaks before an answer has begun is no reason to fail: its gateway may have ended while others are there, or it
has closed the connection, idle until then, in the moment in which a request was sent. Such a request is sent once more.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx

from kvrelay import __version__
from kvrelay.common.errors import SettingsError
from kvrelay.executor.backend import Stats
from kvrelay.executor.completions import CompletionReader, events
from kvrelay.executor.connections import Connections, RemoteSettings
from kvrelay.executor.errors import GatewayUnreachableError, told_error
from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Chat, Request, encode_body
from kvrelay.gateway.errors import ApiError, UnavailableError

_JSON = {"content-type": "application/json"}
_URL = re.compile(r"(?:https?://)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+)(?::[0-9]{1,5})?")
_STATS: dict[str, re.Pattern[str]] = {  # samples that are added up
    "num_running": re.compile(r'kvrelay_worker_requests\{.*state="running"'),
    "num_waiting": re.compile(r'kvrelay_worker_requests\{.*state="waiting"|kvrelay_requests_queued$'),
    "num_used_blocks": re.compile(r'kvrelay_worker_kv_blocks\{.*state="used"'),
    "num_free_blocks": re.compile(r'kvrelay_worker_kv_blocks\{.*state="free"'),
    "num_prompt_tokens": re.compile(r"kvrelay_gateway_prompt_tokens_total$"),
    "num_output_tokens": re.compile(r"kvrelay_gateway_output_tokens_total$"),
}
# What the end of a connection raises; one that cannot be made means that nobody listens, and trying again would not help.
_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class RemoteBackend:
    """Implements :class:`kvrelay.executor.backend.Backend`."""

    def __init__(self, address: str, model: str | None, api_key: str | None, settings: RemoteSettings) -> None:
        """``address``: ``http://HOST:PORT``, with or without ``/v1``; ``model``: the name that the gateway must serve, None: any.

        Raises SettingsError on an address that is none.
        """
        base = address.rstrip("/").removesuffix("/v1")
        if _URL.fullmatch(base) is None:
            raise SettingsError(f"address is {address!r}; write http://HOST:PORT or https://HOST:PORT of a gateway")
        self._url = base if "://" in base else f"http://{base}"
        self._model = model
        self._headers = {"user-agent": f"kvrelay/{__version__}"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._settings = settings
        self._open: Connections | None = None
        self._max_model_len: int | None = None

    async def start(self) -> None:
        """See Backend. Raises ApiError if nobody answers at the address, or the model is not served there."""
        self._open = Connections(self._url, self._headers, self._settings)
        await self._look_at_model()

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        """See Backend."""
        params = request.sampling_params
        prompt = request.prompt
        body = {**request.body("", stream=stream), "return_token_ids": True, "return_tokens_as_token_ids": True}
        if isinstance(prompt, Chat):
            prompt = await self._tokenize(prompt.body())
        elif isinstance(prompt, str) and params.max_tokens is None:
            prompt = await self._tokenize({"prompt": prompt, "add_special_tokens": params.add_special_tokens}) or prompt
        if params.max_tokens is None:
            # The API has no word for "as many as fit": without a number its completions have 16.
            body["max_tokens"] = await self._room_behind(min(len(prompt), params.truncate_prompt_tokens or len(prompt)))
        body["prompt"] = prompt
        reader = CompletionReader(progress, tells_logprobs=params.logprobs is not None)
        if stream:
            await self._stream({**body, "stream_options": {"include_usage": True}}, request, reader)
        else:
            answer = await self._ask("/v1/completions", body, request)
            with _understanding():
                reader.read(answer)

    async def stats(self) -> Stats:
        """See Backend. What the gateway knows of its workers, and counted of its requests."""
        response = await self._get("/metrics")
        lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
        samples = [line.rsplit(" ", 1) for line in lines]
        return {
            name: int(sum(float(value) for sample, value in samples if pattern.match(sample)))
            for name, pattern in _STATS.items()
        }

    def not_live(self) -> list[str]:
        """See Backend. A gateway may always come back."""
        return []

    async def stop(self) -> None:
        """See Backend."""
        if self._open is not None:
            await self._open.aclose()

    async def _look_at_model(self) -> None:
        """Whether the model is served, and how long its sequences may be, if a worker is up. Raises ApiError."""
        response = await self._get("/v1/models" if self._model is None else f"/v1/models/{self._model}")
        with _understanding():
            body = response.json()
            served = body["data"][0] if self._model is None else body
            self._max_model_len = served.get("max_model_len")

    async def _room_behind(self, num_prompt_tokens: int) -> int:
        """So many tokens may follow the prompt; at least 1: what is wrong with a prompt that is too long, the gateway says."""
        if self._max_model_len is None:
            await self._look_at_model()
        if self._max_model_len is None:
            raise UnavailableError("no worker is up at the gateway; try again later", retry_after_s=1.0)
        return max(1, self._max_model_len - num_prompt_tokens)

    async def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a text or a chat. Raises ApiError."""
        answer = await self._ask("/tokenize", body)
        with _understanding():
            self._max_model_len = answer["max_model_len"] or self._max_model_len
            token_ids: list[int] = answer["tokens"]
            return token_ids

    async def _get(self, path: str) -> httpx.Response:
        async with self._sent("GET", path) as response:
            return _accepted(response)

    async def _ask(self, path: str, body: Mapping[str, Any], request: Request | None = None) -> dict[str, Any]:
        async with self._sent("POST", path, body, request) as response:
            with _understanding():
                answer: dict[str, Any] = _accepted(response).json()
                return answer

    async def _stream(self, body: Mapping[str, Any], request: Request, reader: CompletionReader) -> None:
        async with self._sent("POST", "/v1/completions", body, request, stream=True) as response:
            if response.is_error:
                await response.aread()
                _accepted(response)
            async for data in events(response.aiter_bytes()):
                if data == b"[DONE]":
                    return
                with _understanding():
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise told_error(response.status_code, chunk)
                    reader.read(chunk)
        raise GatewayUnreachableError(f"the gateway at {self._url} ended its answer before it was complete")

    @contextlib.asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        request: Request | None = None,
        *,
        stream: bool = False,
    ) -> AsyncIterator[httpx.Response]:
        """The answer, or the head of a streamed one; the second try's, if the connection broke before there was a first.

        ``request``: what headers tell of it. Raises GatewayUnreachableError, also for what happens to the connection meanwhile.
        """
        content = None if body is None else self._encoded(body)
        assert self._open is not None, "requests come between start and stop"
        begun_s = time.monotonic()
        with self._reaching():
            async with self._open.one() as client:

                async def send() -> httpx.Response:
                    headers = {} if request is None else _told(request, time.monotonic() - begun_s)
                    if content is not None:
                        headers.update(_JSON)
                    built = client.build_request(method, path, content=content, headers=headers)
                    return await client.send(built, stream=stream)

                try:
                    response = await send()
                except _BROKEN:
                    response = await send()
                async with contextlib.aclosing(response):
                    yield response

    def _encoded(self, body: Mapping[str, Any]) -> bytes:
        return encode_body(body if self._model is None else {**body, "model": self._model})

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turns what HTTP says of connections into an ApiError that names the address."""
        try:
            yield
        except httpx.TransportError as error:
            raise GatewayUnreachableError(
                f"the gateway at {self._url} cannot be reached, or the connection broke ({type(error).__name__}: {error}); "
                "is one running there?"
            ) from error


def _told(request: Request, late_s: float) -> dict[str, str]:
    """The headers of a request that is sent so late."""
    headers = {"x-request-id": request.request_id or ""}
    if request.timeout_s is not None:
        headers["x-request-timeout"] = f"{max(1e-6, request.timeout_s - late_s):.6f}"
    return headers


def _accepted(response: httpx.Response) -> httpx.Response:
    """``response``, unless it is an error; that is raised as ApiError."""
    if not response.is_error:
        return response
    try:
        body = response.json()
    except ValueError:
        body = response.text
    raise told_error(response.status_code, body, response.headers.get("retry-after"))


@contextlib.contextmanager
def _understanding() -> Iterator[None]:
    """Turns what reading a body raises into an ApiError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ApiError(f"the gateway's answer is not what its API promises: {error!r}") from error
