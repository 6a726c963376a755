"""What is said beside figures that are not to be believed, and that nothing is said beside others."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.launcher.bench.doubts import doubts
from kvrelay.launcher.bench.records import CpuUse, RequestRecord
from tests.launcher.bench.results import result

QUIET = CpuUse(
    num_cores=2,
    generator=0.1,
    server=1.5,
    others=0.05,
    stolen=0.0,
    generator_max_lag_s=0.01,
)


def record(late_s: float = 0.0, **changes: object) -> RequestRecord:
    return msgspec.structs.replace(result().requests[0], due_s=1.0, sent_s=1 + late_s, **changes)


def found(*records: RequestRecord, cpu: CpuUse | None = QUIET) -> list[str]:
    return doubts(records, cpu)


@pytest.mark.parametrize(
    ("changes", "late_s", "words"),
    [
        ({}, 0.001, []),
        ({}, 0.5, ["1 of 2 requests were sent more than 20 ms after they were due"]),
        ({"generator": 0.9, "server": 0.5}, 0, ["the generator used 0.90 cores of the one"]),
        ({"generator_max_lag_s": 0.3}, 0, ["late by up to 300 ms"]),
        ({"others": 0.3}, 0, ["other programs used 0.30 of 2 cores"]),
        ({"stolen": 0.1}, 0, ["the hypervisor took 0.10 of 2 cores"]),
    ],
)
def test_doubts(changes: dict[str, float], late_s: float, words: list[str]) -> None:
    said = found(record(), record(late_s), cpu=msgspec.structs.replace(QUIET, **changes))
    assert len(said) == len(words), said
    assert all(part in text for part, text in zip(words, said, strict=True))


def test_failures_are_named_first() -> None:
    failed = record(error="timeout")
    said = found(record(), record(0.5), failed, failed, record(error="http 503"), cpu=None)
    assert said[0].startswith("3 of 5 requests failed (2 timeout, 1 http 503):")
    assert len(said) == 2


def test_answers_that_nobody_counted_are_named() -> None:
    (said,) = found(record(), record(has_usage=False))
    assert said.startswith("the server did not count the tokens of 1 answers")
