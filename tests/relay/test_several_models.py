"""Two models behind one gateway, with real workers of a fake engine: hand-off, routing, and one of them down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from kvrelay.engine.fake.engine import expected_output, fake_card
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings

from ..gateway.http_app import lifespan
from .http_gateway import write_model
from .workers import LINKS, decode_worker, prefill_worker

PROMPT = list(range(5, 42))
VOCABULARIES = {"small": 300, "large": 200}


async def test_two_models_hand_over_each_among_its_own_workers(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    registries = {name: CollectorRegistry() for name in VOCABULARIES}
    cards = {name: fake_card(vocab_size=size, num_blocks=128, model_id=name) for name, size in VOCABULARIES.items()}
    prefills = {name: prefill_worker(None, card) for name, card in cards.items()}
    decodes = {name: decode_worker(registries[name], card) for name, card in cards.items()}
    workers = [*decodes.values(), *prefills.values()]
    for worker in workers:
        await worker.start()
    settings = GatewaySettings(
        relay=RelaySettings(local_prefill="fallback", room_timeout_s=0.2),
        model=tuple(f"{name}={directory}" for name in cards),
        workers=DiscoverySettings(
            prefill_workers=tuple(f"{name}={worker.address}" for name, worker in prefills.items()),
            decode_workers=tuple(f"{name}={worker.address}" for name, worker in decodes.items()),
        ),
    )
    app = create_app(settings, link_settings=LINKS)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def until(status: int, unavailable: list[str]) -> None:
                async with asyncio.timeout(20):
                    while True:
                        ready = await client.get("/health/ready")
                        if ready.status_code == status and list(ready.json().get("unavailable", {})) == unavailable:
                            return
                        await asyncio.sleep(0.01)  # polls for a state, bounded by the timeout above

            async def ask(model: str) -> httpx.Response:
                body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
                return await client.post("/v1/completions", json={**body, "return_token_ids": True})

            await until(200, [])
            answers = await asyncio.gather(*(ask(name) for name in [*cards, *cards]))
            for name, answer in zip([*cards, *cards], answers, strict=True):
                ids = answer.json()["choices"][0]["token_ids"]
                assert ids == expected_output(PROMPT, 9, VOCABULARIES[name]), name
            for registry in registries.values():
                assert registry.get_sample_value("kvrelay_kv_blocks_received_total")
            await decodes["large"].drain()
            await decodes["large"].stop()
            workers.remove(decodes["large"])
            await until(200, ["large"])
            refused = await ask("large")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].startswith("model 'large': no decode worker is up")
            assert (await ask("small")).json()["choices"][0]["token_ids"] == expected_output(PROMPT, 9, 300)
    finally:
        for worker in workers:
            await worker.stop()
