"""Plans as another process would receive them, and plans that an engine refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvrelay.common.sampling import SampledToken, SamplingParams, Watermark
from kvrelay.engine.step.plan import PlanRow, RowResult, Rules, SamplingInputs, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots

PLAN = StepPlan(
    rows=(
        PlanRow(3, 17, 1, (5,), is_fed=True, num_samples=1),
        PlanRow(0, 0, 4, num_samples=1, prompt_logprobs=(1, 4)),
        PlanRow(1, 4, 1, num_samples=1, adapter=2, draft_tokens=(7, 8)),
    ),
    joins=(SlotJoin(0, "r/1#2", (1, 2, 3, 4), 3, SamplingParams(max_tokens=9, watermark=Watermark(), top_p=0.5)),),
    leaves=(2,),
    tables=(TableDelta(0, 0, (9, 4)), TableDelta(3, 2, (7,), group=1)),
    sampling=SamplingInputs(
        Rules([0], [5], [0.5], [1], [2], [1], [3], [0], np.arange(3, dtype=np.int32).tobytes()), ((3, (6,)),), (1,)
    ),
    resets=True,
)


@pytest.mark.parametrize("plan", [PLAN, StepPlan((PlanRow(0, 0, 1),), sampling=None), StepPlan(())])
def test_another_process_gets_the_plan_that_was_made(plan: StepPlan) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_what_is_computed_goes_back_the_same_way() -> None:
    result = RowResult((SampledToken(4), SampledToken(5, -0.5, ((5, -0.5),))), (SampledToken(1, -1.0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=RowResult) == result


@pytest.mark.parametrize(
    "delta", [TableDelta(0, 0, (1, 2, 3)), TableDelta(0, 2, (1,)), TableDelta(0, 0, (1,), group=1)]
)
def test_tables_that_do_not_fit_are_refused(delta: TableDelta) -> None:
    with pytest.raises(ValueError, match="there are 1 groups, of tables of 2"):
        Slots(1, 2).apply(StepPlan((), tables=(delta,)))
