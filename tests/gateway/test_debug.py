"""What a gateway tells of its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvrelay.wire.messages import FailureCode

from .http_app import TEXT, app_for
from .players import failing


async def test_workers_and_their_breakers_are_shown(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL), relay={"max_attempts": 1}) as app:
        asked = [app.client.post(TEXT, json={"prompt": "x"}) for _ in range(3)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {502}
        known = (await app.client.get("/debug/workers")).json()
        assert (known["pairs"], known["num_queued"]) == ([], 0)
        [worker] = known["workers"]
        assert worker["address"] == app.player.address
        assert (worker["role"], worker["is_usable"], worker["breaker"]) == ("decode", True, "open")
        assert worker["num_free_blocks"] > 0
        assert known["prompt_ways"] == {"local: only_way": 3}
        refused = await app.client.post(TEXT, json={"prompt": "x"})
        assert "failed all of several requests" in refused.json()["error"]["message"]
