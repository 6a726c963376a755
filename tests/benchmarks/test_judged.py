from __future__ import annotations

from msgspec.structs import replace
from peers.load import judged

from kvrelay.launcher.bench.records import CpuUse
from tests.benchmarks.results import record, run, steps

SEEN_BY_THE_GENERATOR = CpuUse(
    num_cores=2, generator=0.1, server=None, others=1.85, stolen=0.2, generator_max_lag_s=0.3, generator_lag_p99_s=0.001
)
SEEN_FROM_OUTSIDE = CpuUse(num_cores=2, generator=0.15, server=1.5, others=0.02, stolen=0.1, generator_max_lag_s=0.0)
RUN = run(record("main", 0.0, steps(1.0, 0.02, 100)), cpu=SEEN_BY_THE_GENERATOR)


def test_the_server_is_told_from_others_and_the_generator_knows_how_late_it_was() -> None:
    result = judged(RUN, SEEN_FROM_OUTSIDE)
    assert result.cpu == replace(SEEN_BY_THE_GENERATOR, server=1.5, others=0.02, generator=0.15)
    assert any("hypervisor took 0.20" in warning for warning in result.warnings)
    assert any("event loop was late by up to 300 ms" in warning for warning in result.warnings)
    assert not any("other programs" in warning for warning in result.warnings)


def test_other_programs_are_named_and_other_doubts_stay() -> None:
    doubted = replace(RUN, warnings=["a worker was restarted"])
    result = judged(doubted, replace(SEEN_FROM_OUTSIDE, others=0.4))
    assert result.warnings[0] == "a worker was restarted"
    assert any("other programs used 0.40 of 2 cores" in warning for warning in result.warnings)


def test_without_a_look_from_outside_nothing_changes() -> None:
    assert judged(RUN, None) == RUN
