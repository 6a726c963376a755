"""Code of kvrelay that reads the real clock in virtual time is found."""

from __future__ import annotations

import pytest

from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.step.plan import StepPlan

from .world import running


def test_who_reads_the_real_clock_in_virtual_time_is_found() -> None:
    paced = FakeEngine(fake_card(), pace=FakePace(0.0, 0.0))
    with running() as world:
        with pytest.raises(AssertionError, match=r"kvrelay\.engine\.fake\.engine calls time\.monotonic\(\)"):
            paced.launch(StepPlan(())).wait()
        assert world.problems == ["kvrelay.engine.fake.engine calls time.monotonic() in virtual time"]
        world.problems.clear()
        world.check()
    assert paced.launch(StepPlan(())).wait() == []
