"""The gateway's application in this process, in front of played workers and without a TCP port for HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.wire.messages import Role, Submit, Timings
from kvrelay.wire.network import Network

from .players import LINKS, Player, Script

CHAT_TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}\n{% endfor %}"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@dataclass
class App:
    """An application with its client and the workers behind it."""

    asgi: ASGIApp
    client: httpx.AsyncClient
    player: Player
    tokenizer: Tokenizer
    prefill: Player | None = None

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """Send a body, check the status, and return the JSON answer."""
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream. On OpenAI's routes the final [DONE] is checked and left out."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        if path.startswith("/v1/"):
            assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    async def lose_worker(self) -> None:
        """Stop the worker, and wait until the gateway is not ready any more."""
        await self.player.server.stop()
        async with asyncio.timeout(20):
            while (await self.client.get("/health/ready")).status_code == 200:
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above

    async def metrics(self) -> dict[str, float]:
        """All samples that are not zero, by name and labels."""
        text = (await self.client.get("/metrics")).text
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in samples if float(value)}


@asynccontextmanager
async def app_for(
    directory: Path, script: Script, *, num_blocks: int = 128, card: ModelCard | None = None, **settings: Any
) -> AsyncIterator[App]:
    """An application connected to one played decode worker, whose pool has blocks of four tokens."""
    card = card or fake_card(vocab_size=300, num_blocks=num_blocks)
    async with apps_for(directory, {"": script}, {"": card}, served_model_name="tiny", **settings) as apps:
        yield apps[""]


@asynccontextmanager
async def apps_for(
    directory: Path,
    scripts: Mapping[str, Script],
    cards: Mapping[str, ModelCard],
    prefills: Mapping[str, tuple[Script, ModelCard]] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[dict[str, App]]:
    """An application connected to a played decode worker for each model. A single model may have no name.

    ``prefills``: a prefill worker's script and card for some models.
    """
    network, tokenizer = Network.open(), Tokenizer.load(directory)
    players = {name: Player(Role.DECODE, script, network, cards[name]) for name, script in scripts.items()}
    before = {name: Player(Role.PREFILL, script, network, card) for name, (script, card) in prefills.items()}
    for name, player in [*players.items(), *before.items()]:
        player.model, player.tokenizer, player.address = name, tokenizer, await player.server.start()
    relay = RelaySettings(**{"room_timeout_s": 20.0, **settings.pop("relay", {})})
    of = {name: f"{name}=" if name else "" for name in players}
    chosen = GatewaySettings(
        relay=relay,
        model=tuple(f"{of[name]}{directory}" for name in players),
        workers=DiscoverySettings(
            prefill_workers=tuple(f"{of[name]}{one.address}" for name, one in before.items()),
            decode_workers=tuple(f"{of[name]}{one.address}" for name, one in players.items()),
        ),
        **settings,
    )
    app = create_app(chosen, link_settings=LINKS)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            async with asyncio.timeout(20):
                while (await client.get("/health/ready")).status_code != 200:
                    await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
            yield {name: App(app, client, player, tokenizer, before.get(name)) for name, player in players.items()}
    finally:
        for player in [*players.values(), *before.values()]:
            await player.server.stop()
        await asyncio.to_thread(network.close)


def http_only(app: ASGIApp) -> ASGIApp:
    """``app`` without its lifespan: for a server in front of an application that is started already."""

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await app(scope, receive, send)

    return ask


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """Start an application, and stop it afterwards, as a server does."""
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()
    task = asyncio.create_task(_run(app, to_app, from_app))
    to_app.put_nowait({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        to_app.put_nowait({"type": "lifespan.shutdown"})
        assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
        await task


async def _run(app: ASGIApp, to_app: asyncio.Queue[Message], from_app: asyncio.Queue[Message]) -> None:
    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, to_app.get, from_app.put)


def saying(
    text: str, *, per_message: int = 1, end: FinishReason | None = FinishReason.STOP, has_eos: bool = False
) -> Script:
    """A script that sends ``text``, ``per_message`` tokens at a time, and then ``end`` (None: nothing).

    ``has_eos`` adds the end-of-text token. The prompt's log probabilities are sent if the request asks for them.
    """

    def script(player: Player, submit: Submit) -> None:
        sampled = tokens_of(player.tokenizer, text, has_eos=has_eos)
        known = [SampledToken(token_id, -0.25, ((token_id, -0.25), (3, -2.0))) for token_id in submit.token_ids[1:]]
        for index in range(0, len(sampled), per_message):
            part = sampled[index : index + per_message]
            is_last = index + per_message >= len(sampled)
            timings = None if index else Timings(queue_s=0.01, prefill_s=0.02, transfer_s=0.03, first_step_s=0.04)
            tells_prompt = index == 0 and submit.sampling.num_prompt_logprobs is not None
            player.tokens(
                submit,
                index,
                part,
                end if is_last else None,
                timings=timings,
                prompt_logprobs=known if tells_prompt else None,
            )

    return script


def tokens_of(tokenizer: Tokenizer, text: str, *, has_eos: bool = False) -> Sequence[SampledToken]:
    """The sampled tokens of a text, with log probabilities."""
    ids = tokenizer.encode(text, add_special_tokens=False) + list(tokenizer.eos_ids[:has_eos])
    return [SampledToken(token_id, -0.5, ((token_id, -0.5), (5, -2.0))) for token_id in ids]
