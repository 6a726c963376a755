"""The model thread's part: what steps take is measured, and the next step follows from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.step import Share
from tests.prefill_worker.rig import ModelRig

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def test_the_next_step_follows_from_what_steps_took() -> None:
    now_s = 50.0
    sizes: list[int] = []

    def take_time(rows: Seq[Share]) -> None:
        """10 ms, and 5 ms for each token."""
        nonlocal now_s
        sizes.append(sum(row.num_tokens for row in rows))
        now_s += 0.01 + 0.005 * sizes[-1]

    engine = FakeEngine(fake_card(num_blocks=512), take_time)
    rig = ModelRig(engine, lambda: now_s, max_batched_tokens=256, ttft_budget_ms=1000)
    rig.local("long", [4, *range(1, 1500)], ONE_TOKEN, now_s)
    for _ in range(6):
        assert rig.worker.step()
    assert sizes[:3] == [256] * 3
    assert sizes[-1] <= 52  # (250 ms - 10 ms) / 5 ms = 48, and what was not yet known of the fixed part
    rig.local("short", [5, *range(1, 20)], ONE_TOKEN, now_s)
    assert rig.worker.step()
    assert [(item.key[0], item.token is not None) for item in rig.reports[-1].progress] == [
        ("short", True),
        ("long", False),
    ]
