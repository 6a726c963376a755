"""The parts of the time to the first two tokens, against sums by hand."""

from __future__ import annotations

import pytest

from kvrelay.launcher.bench.records import RequestRecord, TtftParts
from kvrelay.launcher.bench.summary import PartsSummary, summarize
from tests.launcher.bench.results import record, result

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
