"""The console in a browser, of a gateway that idles, works, loses a worker, has a hundred workers, or is away.

KVRELAY_TEST_PICTURES names a directory for screenshots.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvrelay.gateway.desk.feed import MAX_BYTES_PER_S
from kvrelay.gateway.desk.spans import _WELL_ENDED
from kvrelay.gateway.http.api_keys import line_of

from ..http_app import app_for
from ..players import good
from .browser import PROGRAM, Page, page
from .scene import NUM_BLOCKS, SAID, Scene, scene

FILES = ("", "/console.js", "/console.css", "/uplot.js", "/uplot-LICENSE.txt")
in_browser = [
    pytest.mark.full,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium"),
]
# The labels of the scale of "KV in use", where a decode worker uses this share of its blocks.
TICKS_OF_KV = """import('/console/charts.js').then(({ Charts }) => {
  const place = document.body.appendChild(document.createElement("div"));
  const charts = new Charts(place), used = %s * 10000;
  const figures = { parts_s: {}, itl_s: [null, null], cached: null, prompt_tokens_per_s: 0, output_tokens_per_s: 0 };
  const state = { num_running: 0, num_queued: 0, figures, workers: [["up", "closed", 1, 0, 0, used, null]] };
  for (const at of [1, 2]) charts.add({ workers: [{ role: "decode", num_blocks: 10000 }] }, { at, ...state });
  return new Promise((tell) => requestAnimationFrame(() => tell(charts.charts[4].plot.axes[1]._values)));
})"""
# Lets the page's clock show 0.1 s more for each part of an answer, and 0.6 s more for the part behind this text.
PAUSE_BEHIND = """(before => {
  let parts = 0;
  performance.now = () => 100 * ++parts + 600 * (document.getElementById("said").textContent.length >= before.length);
})(%s)"""
LIVE = "document.getElementById('link').textContent === 'live'"


async def test_the_page_needs_no_key_and_what_it_asks_for_does(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("alice", "a"))
    async with app_for(model_directory, good, api_keys=str(keys)) as app:
        for name in FILES:
            answer = await app.client.get(f"/console{name}")
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            if "uplot" not in name:
                assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        for path in ("/debug/live", "/consoles", "/console/../debug/live"):
            assert (await app.client.get(path)).status_code == 401
        assert (await app.client.get("/console/other")).status_code == 404


def test_the_page_and_traces_agree_on_which_attempts_ended_well() -> None:
    page_file = resources.files("kvrelay.gateway.desk").joinpath("page", "request.js")
    found = re.search(r"const GOOD = (\[.*\]);", page_file.read_text())
    assert found is not None
    assert {*json.loads(found[1])} == {"", *_WELL_ENDED}, "an attempt that runs has no outcome yet"


@asynccontextmanager
async def looking(scene_: Scene, directory: Path, **window: Any) -> AsyncIterator[Callable[..., Any]]:
    """A browser that shows the console. Yields a function that calls another one with its page, on a thread."""
    with_page = page(scene_.url, directory)
    shown: Page = await asyncio.to_thread(with_page.__enter__)

    async def look(does: Callable[[Page], Any]) -> Any:
        return await asyncio.to_thread(does, shown)

    try:
        await look(lambda p: p.show("/console", **window))
        yield look
        assert shown.problems == []
    finally:
        await asyncio.to_thread(with_page.__exit__, None, None, None)


def keep(shown: Page, name: str) -> None:
    if (directory := os.environ.get("KVRELAY_TEST_PICTURES")) is not None:
        shown.picture(Path(directory) / f"{name}.png")


class TestInABrowser:
    pytestmark = in_browser

    async def test_idle(self, model_directory: Path, tmp_path: Path) -> None:
        async with scene(model_directory, 1, 2) as s, looking(s, tmp_path) as look:
            await look(lambda p: p.until(LIVE))
            await look(lambda p: p.until("document.querySelectorAll('#table tbody tr').length === 3"))
            assert "serves tiny" in await look(lambda p: p.text("#models"))
            assert "All breakers are closed" in await look(lambda p: p.text("#breakers"))
            assert await look(lambda p: p.value("document.getElementById('key-form').offsetParent")) is None
            told = await look(Page.accessible)
            named = [name for _, name in told]
            assert any(name.startswith("3 of 3 workers are up.") for name in named)
            assert ("heading", "Workers") in told
            unnamed = [
                role
                for role, name in told
                if role in ("button", "textbox", "spinbutton", "combobox", "image") and not name
            ]
            assert unnamed == []
            await look(lambda p: keep(p, "idle"))

    async def test_small_numbers_are_told_apart(self, model_directory: Path, tmp_path: Path) -> None:
        times_s = [0.00000123, 0.0000704, 0.000671, 0.01234, 1.2345, None]
        texts = ["0 ms", "0.07 ms", "0.67 ms", "12.3 ms", "1.23 s", "-"]
        async with scene(model_directory, 1, 1) as s, looking(s, tmp_path) as look:
            told = f"import('/console/common.js').then((m) => {json.dumps(times_s)}.map(m.ms))"
            assert await look(lambda p: p.value(told)) == texts
            for share in (0.0003, 0.02, 0.3, 1):
                ticks = await look(lambda p, share=share: p.value(TICKS_OF_KV % share))
                assert len(ticks) == len({*ticks}) > 1, f"at {share}"

    async def test_busy_and_a_request_is_followed(self, model_directory: Path, tmp_path: Path) -> None:
        async with scene(model_directory, 3, 3) as s, looking(s, tmp_path, height=1400) as look:
            await look(lambda p: p.until(LIVE))
            for number, worker in enumerate(s.workers):
                worker.num_running, worker.num_waiting = 3 + 4 * (number % 3), number
                worker.num_waiting_tokens, worker.num_free_blocks = 900 * number, NUM_BLOCKS - 700 * number
            for _ in range(3):
                assert {answer.status_code for answer in await s.ask(8)} == {200}
            async with s.asking(8):
                await look(lambda p: p.until("document.querySelectorAll('svg .flow').length > 0"))
                await look(lambda p: p.until("document.querySelectorAll('#charts canvas').length === 6"))
                await look(
                    lambda p: p.until("/prefill [0-9.]+ ms/.test(document.querySelector('#charts').textContent)")
                )
                await look(lambda p: p.until("/KV of [1-9]/.test(document.querySelector('#flows').textContent)"))
            await look(lambda p: p.value("document.getElementById('newest').click()"))
            await look(lambda p: p.until("document.querySelectorAll('#found tbody tr').length === 20"))
            await look(lambda p: p.value("document.querySelector('#found button').click()"))
            await look(lambda p: p.until("document.querySelectorAll('.fall li').length >= 8"))
            told = await look(lambda p: p.text(".fall"))
            assert all(word in told for word in ("waits for a place", "attempt: prefill-", "first step", "output, "))
            await look(lambda p: keep(p, "busy"))

    async def test_a_worker_is_killed_and_an_error_leads_to_its_request(
        self, model_directory: Path, tmp_path: Path
    ) -> None:
        async with scene(model_directory, 1, 2, pace_s=0.2) as s, looking(s, tmp_path) as look:
            await look(lambda p: p.until(LIVE))
            asked = asyncio.create_task(s.ask(2))
            async with asyncio.timeout(20):
                while not s.workers[0].submits:
                    await asyncio.sleep(0.01)  # polls for a state, bounded
            await s.workers[0].leave()
            await look(lambda p: p.until("document.querySelectorAll('svg .is-down').length === 1"))
            await look(lambda p: p.until("document.querySelector('#table tbody').textContent.includes('down')"))
            await asked
            await look(lambda p: p.until("document.querySelectorAll('#errors button').length > 0"))
            assert "answered after peer_lost" in await look(lambda p: p.text("#errors li"))
            await look(lambda p: p.value("document.querySelector('#errors button').focus()"))
            await look(lambda p: p.press("Enter", 13))
            await look(lambda p: p.until("document.querySelectorAll('.fall .bad').length === 1"))
            assert "peer_lost" in await look(lambda p: p.text(".fall .bad"))
            await look(lambda p: keep(p, "worker-killed"))

    async def test_a_hundred_workers_dark_and_on_a_phone(self, model_directory: Path, tmp_path: Path) -> None:
        async with scene(model_directory, 40, 60) as s, looking(s, tmp_path, dark=True) as look:
            await look(lambda p: p.until(LIVE))
            await look(lambda p: p.until("document.querySelectorAll('svg .tile').length === 100"))
            async with s.asking(60):  # equally idle workers share the requests
                await look(lambda p: p.until("document.querySelectorAll('svg .flow').length > 20"))
                for worker in s.workers:
                    worker.num_running, worker.num_free_blocks = worker.number % 17, NUM_BLOCKS - 40 * worker.number
            await look(lambda p: keep(p, "hundred-dark"))
            for width in (390, 320):
                await look(lambda p, width=width: p.size(width, 800))
                await look(lambda p, width=width: p.until(f"innerWidth === {width}"))
                await look(lambda p: p.until("document.documentElement.scrollWidth <= innerWidth"))
            await look(lambda p: keep(p, "hundred-phone"))
            live = await s.client.send(s.client.build_request("GET", "/debug/live"), stream=True)
            num_bytes, loop = 0, asyncio.get_running_loop()
            parts = live.aiter_bytes()
            await anext(parts)  # the list of workers
            begun_s = loop.time()
            while loop.time() < begun_s + 3:
                num_bytes += len(await anext(parts))
            await live.aclose()
            assert num_bytes / (loop.time() - begun_s) < MAX_BYTES_PER_S

    async def test_a_prompt_is_tried(self, model_directory: Path, tmp_path: Path) -> None:
        async with scene(model_directory, 1, 1) as s, looking(s, tmp_path, width=390, height=844) as look:
            await look(lambda p: p.until("document.getElementById('model').value === 'tiny'"))
            token_ids = s.workers[0].tokenizer.encode(SAID, add_special_tokens=False)
            before = s.workers[0].tokenizer.decode(token_ids[: len(token_ids) // 2 + 1])
            await look(lambda p: p.value(PAUSE_BEHIND % json.dumps(before)))
            await look(lambda p: p.value("document.getElementById('prompt').focus()"))
            await look(lambda p: p.press("Tab", 9))
            await look(lambda p: p.press("Enter", 13))  # in a field of the form
            await look(
                lambda p: p.until(
                    "document.getElementById('said-status').textContent.includes('tokens; the first after')"
                )
            )
            assert await look(lambda p: p.text("#said")) == SAID
            assert await look(lambda p: p.value("document.querySelectorAll('#gaps i').length")) > 5
            shown = "[...document.querySelectorAll('#said span')].map((span) => [span.textContent, span.className])"
            parts = await look(lambda p: p.value(shown))
            starts = ["".join(text for text, _ in parts[:index]) for index in range(len(parts))]
            assert [start for start, (_, kind) in zip(starts, parts, strict=True) if kind == "stall"] == [before]
            assert {kind for _, kind in parts} == {"", "stall"}
            await look(lambda p: p.value("document.querySelector('#said-status button').click()"))
            await look(lambda p: p.until("document.querySelectorAll('.fall li').length >= 8"))
            await look(lambda p: keep(p, "prompt-phone"))

    async def test_an_api_that_is_away_comes_back(self, model_directory: Path, tmp_path: Path) -> None:
        async with scene(model_directory, 1, 1) as s, looking(s, tmp_path) as look:
            await look(lambda p: p.until(LIVE))
            s.is_ending = True
            await look(lambda p: p.until("document.getElementById('link').textContent.includes('asking again')"))
            s.is_ending = False
            await look(lambda p: p.until(LIVE))
            s.is_ending = s.server.should_exit = True
            await look(lambda p: p.until("document.getElementById('link').textContent.includes('does not answer')"))
            assert await look(lambda p: p.value("document.querySelectorAll('svg .tile').length")) == 2
            await look(lambda p: keep(p, "away"))
            await look(lambda p: p.problems.clear())  # the browser complains of refused connections

    async def test_a_key_is_asked_for(self, model_directory: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text(f"{line_of('alice', 'a')}\n{line_of('olga', 'o')} operator=1\n")
        async with scene(model_directory, 1, 1, api_keys=str(keys), key="a") as s, looking(s, tmp_path) as look:
            for key, reason in (("a", "not an operator's"), ("o", "")):
                await look(lambda p: p.until("document.activeElement.id === 'key'"))
                await look(lambda p, key=key: p.type(key))
                await look(lambda p: p.press("Enter", 13))
                if reason:
                    await look(
                        lambda p, reason=reason: p.until(
                            f'document.getElementById("key-reason").textContent.includes("{reason}")'
                        )
                    )
            await look(lambda p: p.until(LIVE))
            assert await look(lambda p: p.value("document.getElementById('key-form').hidden"))
            assert "#" not in await look(lambda p: p.value("location.href"))
            await look(lambda p: p.problems.clear())  # the browser complains of 401 and 403
