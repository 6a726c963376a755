from __future__ import annotations

from handoff import summary
from handoff_parts.pools import Sizes
from handoff_parts.rounds import Round

from kvrelay.launcher.bench.records import CpuUse

SIZES = Sizes(1_000_000, 1000)
ROUNDS = {
    "frames": [Round(1.0, 0.1, 0.1), Round(2.0, 0.1, 0.1), Round(4.0, 0.1, 0.1)],
    "verified": [Round(2.0, 0.2, 0.2), Round(1.0, 0.2, 0.2), Round(4.0, 0.2, 0.2)],
}
CPU = CpuUse(num_cores=2, generator=1.0, server=None, others=0.25, stolen=0.5, generator_max_lag_s=0.0)


def test_ratios_are_those_within_rounds_with_their_range() -> None:
    result = summary(SIZES, ROUNDS, CPU)
    assert result["ratios"] == {"verified / frames": {"median": 1.0, "lowest": 0.5, "highest": 2.0}}
    assert result["ways"]["frames"]["gigabytes_per_s"] == {"median": 0.5, "lowest": 0.25, "highest": 1.0}
    assert (result["others_cores"], result["stolen_cores"]) == (0.25, 0.5)
