"""What is said beside figures that are not to be believed, and that nothing is said beside others."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.launcher.bench.doubts import doubts
from kvrelay.launcher.bench.records import CpuUse, RequestRecord

QUIET = CpuUse(
    num_cores=2,
    generator=0.1,
    server=1.5,
    others=0.05,
    stolen=0.0,
    generator_max_lag_s=0.01,
    generator_lag_p99_s=0.001,
    generator_busiest=0.2,
)


def record(late_s: float = 0.0, *, gap_s: float = 0.05, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "index": 0,
        "stream": "main",
        "due_s": 1.0,
        "sent_s": 1 + late_s,
        "finished_s": 9.0,
        "prompt_tokens": 1,
        "planned_output_tokens": 100,
        "output_tokens": 100,
        "chunk_s": [2 + gap_s * place for place in range(100)],
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def found(*records: RequestRecord, cpu: CpuUse | None = QUIET) -> list[str]:
    return doubts(records, cpu, num_processes=1)


@pytest.mark.parametrize(
    ("changes", "late_s", "words"),
    [
        ({}, 0.001, []),
        ({}, 0.5, ["1 of 2 requests were sent more than 20 ms after they were due"]),
        ({"generator": 0.9, "server": 0.5}, 0, ["the generator used 0.90 cores with 1 process:"]),
        ({"generator": 0.4}, 0, ["all cores were busy and the generator used 0.40"]),
        ({"generator_max_lag_s": 0.3}, 0, ["late by up to 300 ms"]),
        ({"others": 0.3}, 0, ["other programs used 0.30 of 2 cores"]),
        ({"stolen": 0.1}, 0, ["the hypervisor took 0.10 of 2 cores"]),
        # A minute at 0.3 of a core with a second at 0.97, or one of four processes at it.
        (
            {"generator": 0.3, "generator_busiest": 0.97, "server": 1.0},
            0,
            ["used 0.97 of a core in its busiest second"],
        ),
        ({"generator_busiest": None, "generator_lag_p99_s": None}, 0, []),  # of an older file
    ],
)
def test_doubts(changes: dict[str, float], late_s: float, words: list[str]) -> None:
    said = found(record(), record(late_s), cpu=msgspec.structs.replace(QUIET, **changes))
    assert len(said) == len(words), said
    assert all(part in text for part, text in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("gap_s", "p99_s", "max_s", "word"),
    [
        (0.05, 0.004, 0.02, None),
        (0.05, 0.006, 0.02, "late by 6 ms at its 99th percentile, and by 20 ms at most: the reported 50 ms (p99)"),
        (0.005, 0.0015, 0.003, None),  # as late as timers are
        (0.005, 0.003, 0.003, "late by 3 ms at its 99th percentile"),
        (0.05, 0.001, 0.03, "late by up to 30 ms"),  # of the longest gap, 50 ms
    ],
)
def test_a_late_loop_matters_where_it_is_a_part_of_what_is_reported(
    gap_s: float, p99_s: float, max_s: float, word: str | None
) -> None:
    said = found(
        record(gap_s=gap_s),
        cpu=msgspec.structs.replace(QUIET, generator_lag_p99_s=p99_s, generator_max_lag_s=max_s),
    )
    assert len(said) == (word is not None), said
    assert word is None or word in said[0]


def test_answers_of_one_token_are_compared_by_their_first() -> None:
    cpu = msgspec.structs.replace(QUIET, generator_lag_p99_s=0.05)
    assert found(record(chunk_s=[2.0]), cpu=cpu) == []
    (said,) = found(record(chunk_s=[1.1]), cpu=cpu)
    assert "until the first token" in said


def test_a_server_that_others_may_be_has_no_core_to_spare_either() -> None:
    """With --url nobody knows whose the others are; all cores busy is said all the same."""
    busy = msgspec.structs.replace(QUIET, server=None, others=1.81)
    (said,) = found(record(), cpu=busy)
    assert said.startswith("1.91 of 2 cores of this machine were busy, 1.81 with other programs")
    assert found(record(), cpu=msgspec.structs.replace(busy, others=1.0)) == []


def test_failures_are_named_first() -> None:
    failed = record(error="timeout", chunk_s=[])
    said = found(record(), record(0.5), failed, failed, record(error="http 503"), cpu=None)
    assert said[0].startswith("3 of 5 requests failed (2 timeout, 1 http 503):")
    assert len(said) == 2


def test_answers_that_nobody_counted_are_named() -> None:
    (said,) = found(record(), record(has_usage=False))
    assert said.startswith("the server did not count the tokens of 1 answers")
