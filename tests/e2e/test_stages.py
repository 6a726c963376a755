"""Workers of several stages with workers of one rank: answers equal those of one rank, and a killed stage costs only a
pause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings

from . import test_ranks
from .conftest import PATIENCE_S
from .promises import Answer

pytestmark = pytest.mark.timeout(300)

STAGES = {"2-to-1": {"prefill_pipeline_parallel": 2}, "1-to-3": {"decode_pipeline_parallel": 3}}


@pytest.fixture(scope="module", params=STAGES)
def staged(request: pytest.FixtureRequest, model_directory: Path) -> Iterator[LocalDeployment]:
    """A prefill and a decode worker, one of them with two or three pipeline stages."""
    chosen: dict[str, Any] = STAGES[request.param]
    settings = LocalSettings.of(
        port=0, device="cpu", dtype="float32", threads=1, num_blocks=64, local_prefill="fallback",
        room_timeout_s=PATIENCE_S, **chosen,
    )  # fmt: skip
    with LocalDeployment.from_settings(settings, model_directory) as running:
        running.wait_ready(timeout_s=180)
        yield running


async def test_pools_in_stages_answer_as_one_rank_does(of_one_rank: dict[str, Answer], staged: LocalDeployment) -> None:
    await test_ranks.test_unequal_pools_answer_as_one_rank_does(of_one_rank, staged)


async def test_a_stage_that_is_killed_costs_a_pause(of_one_rank: dict[str, Answer], staged: LocalDeployment) -> None:
    await test_ranks.test_a_rank_that_is_killed_costs_a_pause(of_one_rank, staged)
