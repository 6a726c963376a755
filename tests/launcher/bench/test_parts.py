"""The parts of the time to the first two tokens: sums by hand, and a real gateway and workers over fake engines."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.engine.fake.step import Share
from kvrelay.launcher.bench.client import TIMINGS_HEADER, StreamingClient
from kvrelay.launcher.bench.records import RequestRecord, TtftParts
from kvrelay.launcher.bench.summary import PartsSummary, summarize
from tests.launcher.bench.results import record, result
from tests.relay.http_gateway import deployment, write_model

PARTS = TtftParts(
    accept_s=0.1, queue_s=0.2, prefill_s=0.3, transfer_s=0.05, first_step_s=0.1, ttft_s=0.7, second_token_s=0.9
)


def told(**changes: object) -> RequestRecord:
    """A request with the parts that the server reported."""
    return record(**{"sent_s": 0.0, "chunk_s": [0.75, 0.98, 1.0], "parts": PARTS, **changes})  # type: ignore[arg-type]


def parts_of(*records: RequestRecord, stream: str = "main") -> PartsSummary | None:
    found = summarize(result(requests=list(records))).stream(stream)
    return None if found is None else found.parts


def test_each_part_by_hand() -> None:
    found = parts_of(told(sent_s=0.02, chunk_s=[0.77, 1.0, 1.02]))  # sent 20 ms late, which counts as the client's time
    assert found is not None
    assert {name: part.p50 for name, part in found.first_token.items()} == {
        "accept": 0.1, "queue": 0.2, "prefill": 0.3, "rest": pytest.approx(0.1), "network and client": pytest.approx(0.07)
    }  # fmt: skip
    assert found.first_token_whole.p50 == pytest.approx(0.77)
    assert {name: part.p50 for name, part in found.second_token.items()} == {
        "transfer wait": 0.05, "first decode step": 0.1, "rest": pytest.approx(0.05),
        "network and client": pytest.approx(0.03),
    }  # fmt: skip
    assert found.second_token_whole is not None
    assert found.second_token_whole.p50 == pytest.approx(0.23)


def test_streams_have_parts_of_their_own() -> None:
    slow = told(stream="burst", parts=TtftParts(accept_s=0.0, queue_s=0.0, prefill_s=0.7, ttft_s=0.7))
    main, burst = (parts_of(told(), slow, stream=stream) for stream in ("main", "burst"))
    assert main is not None
    assert burst is not None
    assert (main.num_requests, main.first_token["prefill"].max) == (1, 0.3)
    assert (burst.num_requests, burst.first_token["prefill"].max) == (1, 0.7)


def test_parts_of_local_prefill_have_no_hand_off() -> None:
    local = TtftParts(accept_s=0.1, queue_s=0.2, prefill_s=0.3, ttft_s=0.7, second_token_s=0.9)
    unknown = told(parts=TtftParts(ttft_s=1.0))
    found = parts_of(told(parts=local), unknown, told(parts=None), told(error="timeout"), told(chunk_s=[]))
    assert found is not None
    assert found.num_requests == 1
    assert found.second_token == {}
    assert found.second_token_whole is None
    assert parts_of(told(parts=None)) is None


class Held:
    """An ``on_step`` that makes the step of a sequence with ``num_tokens`` output tokens ``HELD_S`` longer, by its own
    clock."""

    HELD_S = 0.3

    def __init__(self, num_tokens: int) -> None:
        self.held_s = 0.0
        self._num_tokens = num_tokens

    def __call__(self, rows: Sequence[Share]) -> None:
        if not self.held_s and any(row.sequence.num_output_tokens == self._num_tokens for row in rows):
            before_s = time.monotonic()
            time.sleep(self.HELD_S)  # the step's cost
            self.held_s = time.monotonic() - before_s


async def test_what_a_gateway_says_of_the_first_two_tokens_leaves_no_more_than_was_not_computed(tmp_path: Path) -> None:
    """One prefill step and one decode step are made longer. Their parts cover at least that time on any machine."""
    prefill, decode = Held(0), Held(1)
    async with deployment(write_model(tmp_path), prefill_gate=prefill, gate=decode) as up:
        asked = {TIMINGS_HEADER: "1"}
        client = StreamingClient(up.url, "completions", timeout_s=60, clock=time.monotonic, headers=asked)
        body = {
            "model": "tiny", "prompt": list(range(3, 40)), "max_tokens": 5, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = await client.ask(json.dumps(body).encode(), exact_tokens=5)
        await client.close()
    assert answer.error is None, answer.error_text
    assert min(prefill.held_s, decode.held_s) >= Held.HELD_S
    found = parts_of(
        record(
            due_s=answer.sent_s,
            sent_s=answer.sent_s,
            finished_s=answer.finished_s,
            chunk_s=answer.chunk_s,
            parts=answer.parts,
        )
    )
    assert found is not None
    first, second = found.first_token, found.second_token
    assert all(part.max >= 0 for part in first.values())
    # The sum, because a step may have begun on the model's thread before the worker notes its begin.
    assert first["queue"].max + first["prefill"].max >= prefill.held_s
    assert first["rest"].max + first["network and client"].max <= found.first_token_whole.max - prefill.held_s
    assert found.second_token_whole is not None
    assert second["first decode step"].max >= decode.held_s
    # The decode worker may learn of the first token before the client does, so its part may begin earlier.
    unexplained_s = second["rest"].max + second["network and client"].max
    assert unexplained_s <= found.second_token_whole.max - decode.held_s
    assert sum(part.mean for part in first.values()) == pytest.approx(answer.chunk_s[0] - answer.sent_s)
    assert sum(part.mean for part in second.values()) == pytest.approx(answer.chunk_s[1] - answer.chunk_s[0])
