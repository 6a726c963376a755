"""Bodies that take long to process do not block the loop for other requests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ..http_app import CHAT, TEXT, App, app_for
from ..players import good

WORDS = "one relay hands the baton to the next one "
USER = {"role": "user", "content": "x"}

BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "a long prompt": (TEXT, {"prompt": WORDS * 50_000}, 400),
    "many prompts": (TEXT, {"prompt": [WORDS * 90] * 128}, 400),
    "many messages": (CHAT, {"messages": [USER] * 100_000}, 400),
    "many parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]}, 400),
    "a long list that nobody knows": (TEXT, {"prompt": "x", "unheard": [[1]] * 1_000_000}, 200),
    "many fields that nobody knows": (TEXT, {"prompt": "x", **{f"f{number}": 1 for number in range(390_000)}}, 200),
    "many objects that nobody knows": (CHAT, {"messages": [USER], "unheard": [{"a": {}}] * 450_000}, 200),
    "a long text to tokenize": ("/tokenize", {"inputs": WORDS * 10_000}, 200),
    "a long text of token ids": ("/detokenize", {"tokens": [290] * 500_000}, 200),
}


NUM_TRIES = 5


class Gaps:
    """Measures the longest time for which the loop was blocked, in CPU seconds of its thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)  # a turn of the loop
            now_s = time.thread_time()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s


@pytest.mark.full
@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_is_much_work_does_not_stop_the_others(model_directory: Path, name: str) -> None:
    """The loop is blocked for a tenth of a second at most, in the best of five tries: others may disturb some."""
    path, body, status = BODIES[name]
    async with app_for(model_directory, good, max_body_bytes=2**23) as app:
        request = app.client.build_request("POST", path, json=body)
        longest_s = []
        for _ in range(NUM_TRIES):
            gaps = Gaps()
            watching = asyncio.create_task(gaps.watch())
            await asyncio.sleep(0)
            response = await app.client.send(request)
            await asyncio.sleep(0)
            watching.cancel()
            assert response.status_code == status, response.text[:300]
            longest_s.append(gaps.longest_s)
            if gaps.longest_s <= 0.1:
                return
        pytest.fail(f"gaps of {longest_s} s")


async def test_bad_words_have_a_bound_in_all(app: App) -> None:
    error = (await app.post(TEXT, 400, prompt="x", bad_words=["x" * 4096] * 200))["error"]
    assert error["param"] == "bad_words"
    assert "819200 characters in all; at most 8192" in error["message"]
    await app.post(TEXT, prompt="x", bad_words=["x" * 4096] * 2)


async def test_what_is_not_served_is_refused_beside_whatever_nobody_knows(app: App) -> None:
    unheard = {f"f{number}": 1 for number in range(100_001)}
    error = (await app.post(TEXT, 400, prompt="x", suffix="y", **unheard))["error"]
    assert (error["param"], "is not supported" in error["message"]) == ("suffix", True)
    answer = await app.client.post(TEXT, json={"prompt": "x", **unheard})
    assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False)


async def test_a_number_that_is_none_is_no_json_also_where_nobody_reads_it(app: App) -> None:
    headers = {"content-type": "application/json"}
    answer = await app.client.post(TEXT, content=b'{"prompt": "x", "unheard": NaN}', headers=headers)
    assert (answer.status_code, "not valid JSON" in answer.text) == (400, True)
