"""Workers of several stages with workers of one rank: answers equal those of one rank, and a killed stage costs only a
pause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.launcher.local.deployment import LocalDeployment

from . import test_ranks
from .conftest import serving
from .promises import Answer

pytestmark = pytest.mark.timeout(300)

STAGES = {"2-to-1": {"prefill_pipeline_parallel": 2}, "1-to-3": {"decode_pipeline_parallel": 3}}


@pytest.fixture(scope="module", params=STAGES)
def staged(request: pytest.FixtureRequest, model_directory: Path) -> Iterator[LocalDeployment]:
    """A prefill and a decode worker, one of them with two or three pipeline stages."""
    chosen: dict[str, Any] = STAGES[request.param]
    with serving(model_directory, num_blocks=64, **chosen) as running:
        yield running


async def test_pools_in_stages_answer_as_one_rank_does(of_one_rank: dict[str, Answer], staged: LocalDeployment) -> None:
    await test_ranks.test_unequal_pools_answer_as_one_rank_does(of_one_rank, staged)


async def test_a_stage_that_is_killed_costs_a_pause(of_one_rank: dict[str, Answer], staged: LocalDeployment) -> None:
    await test_ranks.test_a_rank_that_is_killed_costs_a_pause(of_one_rank, staged)
